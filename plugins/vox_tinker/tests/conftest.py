"""A server over a tiny model in a thread of this process, and clients of the real SDK."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vox_core.api.settings import TrainSettings
from vox_testing.tiny import make_model

if TYPE_CHECKING:
    import tinker
    import uvicorn

    from vox_tinker.sessions import Served

KEY = "tml-for-tests-only"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore sockets of the SDK, which does not close the pool of its first request."""
    left = "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings(left))


@contextmanager
def running(served: dict[str, Served], root: Path, key: str | None = None) -> Iterator[str]:
    """Answer from a thread; yields the URL."""
    from vox_core.api.serving import listening
    from vox_tinker.checkpoints import Store
    from vox_tinker.server import answer

    servers: list[uvicorn.Server] = []
    with closing(listening("127.0.0.1", 0)) as listener:
        work = answer(served, Store(root), key, listener, started=servers.append)
        thread = threading.Thread(target=asyncio.run, args=(work,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            servers[0].should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("tinker") / "base")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def served(base: Path) -> Iterator[Served]:
    from vox_tinker.server import opened

    settings = TrainSettings(backend="cpu", dtype="fp32")
    with opened("tiny", str(base), settings, lambda _: None) as found:
        yield found


@pytest.fixture(scope="session")
def url(served: Served, runs: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setenv("TINKER_API_KEY", KEY)
        with running({"tiny": served}, runs) as found:
            yield found


@pytest.fixture(scope="module")
def service(url: str) -> Iterator[tinker.ServiceClient]:
    import tinker

    client = tinker.ServiceClient(base_url=url)
    yield client
    client.close("success").result()


@pytest.fixture
def client(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1).result()
