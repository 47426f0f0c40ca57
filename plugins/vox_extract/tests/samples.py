"""Small packages whose rows are written out in full, and a short way to get the rows of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vox_extract.locate import Reader, locate
from vox_extract.python_rows import python_rows
from vox_extract.rows import Extracted, Sieve

NUMPY = '''
def scale(values, factor=2.0, *, out=None):
    """
    Multiply each value by a factor.

    The result has the shape of `values`; see :func:`numpy.multiply`.

    Parameters
    ----------
    values : array_like
        What is multiplied,
        element by element.
    factor, offset : float, optional
        By how much it is multiplied.

    Returns
    -------
    scaled : ndarray
        The products.

    Raises
    ------
    ValueError
        If ``factor`` is not finite.

    See Also
    --------
    shift : adds

    Notes
    -----
    It is linear [1]_.

    References
    ----------
    .. [1] Somebody, "Lines".

    Examples
    --------
    Twice as much:

    >>> scale([1, 2])
    array([2., 4.])

    >>> scale([1], 3)
    array([3.])
    """
'''
GOOGLE = '''
class Box:
    """A box that holds things.

    Attributes:
        size (int): How many things fit in.
    """

    def __init__(self, size: int = 3) -> None:
        """Makes it.

        Args:
            size: How many things will fit.
                Not less than one.
        """

    def take(self, name: str, *, hard: bool = False) -> str:
        """Takes a thing out.

        Args:
            name (str): What it is called.
            hard: Whether to pull.

        Returns:
            str: The thing itself.

        Raises:
            KeyError: If nothing is called so.

        Example:
            A box of one::

                Box(1).take("a")
        """
'''
SPHINX = '''
async def fetch(address: str, tries: int = 1) -> bytes:
    """Fetch what is at an address.

    :param str address: where it is,
        with its scheme
    :param tries: how often to try again
    :type tries: int
    :returns: what was there
    :rtype: bytes
    :raises OSError: when the line is down

    .. deprecated:: 2.1
       Use :meth:`~web.Client.get`.
    """
'''


def made(folder: Path, files: dict[str, str]) -> Path:
    """A package `pack` of these files, with an `__init__.py` if none is given."""
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "pack"


def rows_in(path: Path, *, private: bool = False, **sieve: Any) -> list[Extracted]:
    return read(path, private=private, **sieve)[0]


def read(
    path: Path, *, private: bool = False, **sieve: Any
) -> tuple[list[Extracted], Sieve, Reader]:
    """The rows of a folder or a file, what was left out, and what could not be read."""
    sieving, reader = Sieve(**sieve), Reader()
    rows = python_rows(locate(str(path)), sieving, reader, private=private)
    return list(rows), sieving, reader


def said(rows: list[Extracted]) -> list[tuple[str, str, str]]:
    return [(row.kind, row.question, row.answer) for row in rows]
