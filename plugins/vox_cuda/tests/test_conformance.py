"""The CUDA backend passes vox's conformance suite, where there is a GPU that torch can use."""

import pytest

from vox_core.errors import BackendError
from vox_cuda.probe import hardware
from vox_cuda.ready import require_cuda
from vox_testing.suite import *  # noqa: F403

VOX_BACKEND = "cuda"


def why_not() -> str:
    """Why the suite cannot be run here; empty if it can. torch is asked where there is a GPU."""
    found = hardware()
    if not found["present"]:
        return str(found["detail"])
    try:
        require_cuda()
    except BackendError as error:
        return f"{error.what}: {error.found}"
    return ""


REASON = why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON)]
