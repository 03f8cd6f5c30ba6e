"""--save_to in other stores than moto's: each is a real server on loopback.

They need packages that are no requirements: gcsfs and gcp-storage-emulator, adlfs, and from npm
azurite and s3rver, whose commands must be on PATH.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from conftest import RECIPE, REPOSITORY, load_script
from forked import forked
from stores import (
    AWS,
    CuttingProxy,
    download,
    environment,
    free_port,
    kill_when,
    npm_server,
)

from llama_ft.extensions.store.object_store import (
    ObjectStore,
    is_uploaded,
    read_commits,
    with_retries,
)

# of Azurite's documentation, the same everywhere
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextmanager
def google(folder: Path) -> Iterator[str]:
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="runs")
    server.start()
    try:
        # the emulator does not know the API that tells the kinds of buckets
        variables = {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        with environment(variables):
            yield "gs://runs/run"
    finally:
        server.stop()


@contextmanager
def azure(folder: Path) -> Iterator[str]:
    pytest.importorskip("adlfs")
    blob = pytest.importorskip("azure.storage.blob")
    port = free_port()
    flags = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{AZURE_ACCOUNT};"
    )
    with (
        npm_server("azurite-blob", port, "--blobPort", str(port), *flags),
        environment({"AZURE_STORAGE_CONNECTION_STRING": connection}),
    ):
        blob.BlobServiceClient.from_connection_string(connection).create_container("runs")
        yield "az://runs/run"


@contextmanager
def s3_that_cuts_connections(folder: Path) -> Iterator[str]:
    port = free_port()
    flags = ["--directory", str(folder / "s3rver"), "--address", "127.0.0.1", "--port", str(port)]
    flags += ["--allow-mismatched-signatures", "--configure-bucket", "runs"]
    with npm_server("s3rver", port, *flags):
        proxy = CuttingProxy(port, most_bytes=600_000)
        # s3rver does not know the checksums that newer clients append to an upload
        variables = {
            **AWS,
            "AWS_ACCESS_KEY_ID": "S3RVER",
            "AWS_SECRET_ACCESS_KEY": "S3RVER",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        }
        with environment(variables):
            yield "s3://runs/run"
        proxy.close()
        assert proxy.cuts > 0


STORES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "google": google,
    "azure": azure,
    "s3 that cuts connections": s3_that_cuts_connections,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
def test_a_run_killed_during_an_upload_continues_on_an_empty_disk(
    kind: str, tmp_path: Path
) -> None:
    crash: ModuleType = load_script(REPOSITORY / "benchmarks" / "checkpoints" / "crash.py")
    crash.write_inputs(tmp_path)
    flags = [*crash.FLAGS, "--model_name", f"{tmp_path}/model", "--no_plan"]
    flags += ["--dataset", f"{tmp_path}/rows.jsonl"]
    finished = forked(RECIPE, *flags, "--output_dir", tmp_path / "whole", ranks=2)
    assert finished.exit_code == 0, finished.output
    last_step = crash.read_metrics(tmp_path / "whole")[-1]["step"]
    run = tmp_path / "run"
    with STORES[kind](tmp_path) as url:
        store = ObjectStore(url, "")
        with_retries(lambda: store.put_text("mine", "checkpoints/notes.txt"))
        words = [*flags, "--output_dir", str(run), "--save_to", url]
        kill_when(lambda: read_commits(store), words, tmp_path / "log")
        held = max(read_commits(store))
        was_complete = is_uploaded(store, last_step)
        shutil.rmtree(run)
        resumed = forked(RECIPE, *words, ranks=2)
        assert resumed.exit_code == 0, resumed.output
        assert was_complete or f"Fetching step-{held:06d} from {url}" in resumed.output
        assert is_uploaded(store, last_step)
        copy = download(url, tmp_path / "copy")
        assert crash.differences(copy, tmp_path / "whole", all_checkpoints=False) == []
        assert (copy / "checkpoints" / "notes.txt").read_text() == "mine"
