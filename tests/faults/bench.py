"""What all cases share: one MLflow server, two fork servers, one thread of proxies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile

from mlflow import MlflowClient

from tests.faults.processes import ForkServer
from tests.faults.proxy import ProxyThread
from tests.servers import mlflow_server


@dataclass(frozen=True)
class Bench:
    """server: its own address, past all proxies."""

    server: str
    forks: ForkServer
    forks_with_paddle: ForkServer
    proxies: ProxyThread
    folder: Path

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.server)

    @property
    def database(self) -> Path:
        return _database(self.folder)


@contextmanager
def bench(folder: Path, empty_store: Path | None = None) -> Iterator[Bench]:
    """Start everything, and stop it at the end. empty_store: a database with its tables, to begin with."""
    folder.mkdir(parents=True, exist_ok=True)
    if empty_store is not None:
        copyfile(empty_store, _database(folder))
    forks = ForkServer(folder / "fork-server.log")
    with_paddle = ForkServer(folder / "fork-server-paddle.log", "paddle")
    proxies = ProxyThread()
    try:
        with mlflow_server(f"sqlite:///{_database(folder)}", folder, app=None) as server:
            yield Bench(server, forks, with_paddle, proxies, folder)
    finally:
        proxies.close()
        forks.close()
        with_paddle.close()


def _database(folder: Path) -> Path:
    return folder / "mlflow.db"
