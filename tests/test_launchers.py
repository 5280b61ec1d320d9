"""What starts jobs elsewhere: the commands, the restarts, the manifests; no cloud, no network, no accelerator."""

import copy
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
TOKEN = "hf_verysecret"
# What none of these scripts may touch in a dry run.
CLOUD = ("gcloud", "kubectl", "xpk", "docker", "ssh", "scp", "srun", "sbatch", "scancel", "scontrol")
JOB = ["--", "--config=configs/medmcqa.py:qwen3_8b", "--config.data.path=it's here"]


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def shell(tmp_path):
    """Runs a script with a PATH on which every cloud command fails the test; `.bin` is where to put others."""
    for name in CLOUD:
        executable(
            tmp_path / "bin" / name, f"#!/bin/sh\necho {name} was called >&2\ntouch {tmp_path}/called\nexit 99\n"
        )
    base = {key: os.environ[key] for key in ("LANG", "TMPDIR") if key in os.environ}
    base |= {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path / "home"), "NCA_JAX_POLL": "0"}
    (tmp_path / "home").mkdir()

    def run(*arguments, **environment) -> subprocess.CompletedProcess:
        command = ["bash", *map(str, arguments)]
        return subprocess.run(command, env=base | environment, capture_output=True, text=True, timeout=30, cwd=ROOT)

    run.bin, run.env, run.called = tmp_path / "bin", base, tmp_path / "called"
    return run


def commands(printed: str) -> list[list[str]]:
    """What a shell would run if it was given this."""
    return [shlex.split(line) for line in printed.splitlines() if not line.startswith("#")]


# ------------------------------------------------------------------------------------------------ worker.sh


@pytest.fixture
def python(tmp_path):
    """A ready environment whose python ends with the codes it is given, one a run; `kill` is what the system does."""
    path = executable(
        tmp_path / "venv/bin/python",
        f"""#!/bin/bash
        cd {tmp_path}
        printf '%s\\n' "$JAX_PLATFORMS $*" >>runs
        code=$(head -n 1 codes); sed -i 1d codes
        case "$code" in
          kill) kill -KILL $$ ;;
          wait-*)
            trap 'echo term >>signals; sleep 0.2; exit '${{code#wait-}} TERM
            touch ready; while true; do sleep 0.02; done ;;
          *) exit $code ;;
        esac
        """,
    )

    def codes(*values) -> dict[str, str]:
        (tmp_path / "codes").write_text("".join(f"{value}\n" for value in values))
        return {"NCA_JAX_VENV": str(path.parents[1]), "NCA_JAX_PAUSE": "0"}

    codes.runs = lambda: (tmp_path / "runs").read_text().splitlines() if (tmp_path / "runs").exists() else []
    codes.left = lambda: (tmp_path / "codes").read_text().split()
    return codes


@pytest.mark.parametrize(
    "codes, retries, code, runs",
    [
        ([0, 9], "3", 0, 1),
        ([2, 0], "3", 2, 1),
        ([75, 0], "0", 0, 2),  # being stopped is not a crash
        ([75, 75, 75, 75, 75, 0], "3", 0, 6),
        ([1, 0], "3", 0, 2),
        ([1, 75, 1, 0], "2", 0, 4),
        ([1, 75, 7, 0], "1", 7, 3),
        ([1, "kill", 134, "kill", 0], "3", 137, 4),
        (["kill", 0], "0", 137, 1),
        ([1, 2], "3", 2, 2),
    ],
)
def test_worker_restarts_what_can_go_on(shell, python, codes, retries, code, runs):
    result = shell(LAUNCH / "worker.sh", "--config=a b", "--x='", NCA_JAX_RETRIES=retries, **python(*codes))
    assert result.returncode == code, result.stderr
    assert python.runs() == ["cpu -m nca_jax.main --config=a b --x='"] * runs
    assert len(python.left()) == len(codes) - runs


@pytest.mark.parametrize("code, expected", [(75, 75), (0, 0), (2, 2), (143, 75)])
def test_worker_passes_the_signal_on_once_and_waits(shell, python, tmp_path, code, expected):
    environment = shell.env | python(f"wait-{code}", 0)
    worker = subprocess.Popen(["bash", LAUNCH / "worker.sh"], env=environment, start_new_session=True)
    deadline = time.monotonic() + 10
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # As Slurm and a terminal do: to the whole group, and again.
    os.killpg(worker.pid, signal.SIGTERM)
    os.killpg(worker.pid, signal.SIGINT)
    assert worker.wait(10) == expected
    assert (tmp_path / "signals").read_text() == "term\n"
    assert python.left() == ["0"]


def test_worker_stops_while_it_pauses(shell, python):
    environment = shell.env | python(1, 0) | {"NCA_JAX_PAUSE": "60"}
    worker = subprocess.Popen(["bash", LAUNCH / "worker.sh"], env=environment, stderr=subprocess.PIPE, text=True)
    assert "exit code 1, starting again in 60 s (1 of 3" in worker.stderr.readline()
    worker.terminate()
    assert worker.wait(10) == 75
    assert python.left() == ["0"]


@pytest.mark.parametrize(
    "environment, platforms",
    [
        ({}, "cpu"),
        ({"NCA_JAX_EXTRA": "tpu"}, "tpu,cpu"),
        ({"NCA_JAX_EXTRA": "cuda13"}, "cuda,cpu"),
        ({"NCA_JAX_EXTRA": "tpu", "JAX_PLATFORMS": ""}, ""),
    ],
)
def test_worker_names_the_platform(shell, python, environment, platforms):
    assert shell(LAUNCH / "worker.sh", **python(0), **environment).returncode == 0
    assert python.runs() == [f"{platforms} -m nca_jax.main"]


def test_worker_refuses_an_extra_it_does_not_know(shell, python):
    result = shell(LAUNCH / "worker.sh", NCA_JAX_EXTRA="cuda12", **python(0))
    assert result.returncode == 2 and result.stderr.startswith("error: NCA_JAX_EXTRA=cuda12 is not")
    assert python.runs() == []


def test_worker_installs_the_extra_and_only_what_is_missing(shell, tmp_path):
    # A python that pretends to make environments and to install.
    base = executable(
        tmp_path / "python3",
        f"""#!/bin/bash
        case "$1 $2" in
          "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
          "-m pip") printf '%s\\n' "$*" >>{tmp_path}/pip ;;
          -c*) echo 3.13 ;;
          *) printf '%s\\n' "$*" >>{tmp_path}/runs ;;
        esac
        """,
    )
    environment = {"PYTHON": str(base), "NCA_JAX_VENV": str(tmp_path / "new")}

    def installed(*arguments, extra):
        (tmp_path / "pip").write_text("")
        result = shell(LAUNCH / "worker.sh", *arguments, NCA_JAX_EXTRA=extra, **environment)
        assert result.returncode == 0, result.stderr
        return [line.removeprefix("-m pip install --no-input ") for line in (tmp_path / "pip").read_text().splitlines()]

    assert installed("--install", extra="tpu") == ["-r requirements.txt jax[tpu] gcsfs -c constraints.txt"]
    assert not (tmp_path / "runs").exists()
    assert installed("--config=x", extra="tpu") == []
    assert (tmp_path / "runs").read_text() == "-m nca_jax.main --config=x\n"
    assert installed("--install", extra="") == []  # what is for an accelerator does for the CPU
    assert installed("--install", extra="cuda13") == ["-r requirements.txt jax[cuda13] -c constraints.txt"]


# ------------------------------------------------------------------------------------------------ detached.sh


def test_a_detached_command_is_started_once_followed_and_leaves_its_code(shell, tmp_path):
    job = tmp_path / "job"
    job.mkdir()
    (job / "environment").write_text(f"HF_TOKEN={TOKEN}\n")
    script = f"echo $HF_TOKEN $0; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo end; exit 7"
    started = shell(LAUNCH / "detached.sh", "start", job, "bash", "-c", script, "one argument")
    assert started.stdout.startswith("started") and TOKEN not in started.stdout
    assert shell(LAUNCH / "detached.sh", "running", job).returncode == 0
    assert shell(LAUNCH / "detached.sh", "start", job, "false").stdout.startswith("already running")
    follow = subprocess.Popen(["bash", LAUNCH / "detached.sh", "follow", job], stdout=subprocess.PIPE, env=shell.env)
    (tmp_path / "go").touch()
    assert follow.communicate(timeout=10)[0].decode() == f"{TOKEN} one argument\nend\n"
    assert (job / "exit_code").read_text() == "7\n"
    assert shell(LAUNCH / "detached.sh", "running", job).returncode == 1
    # Started again, it has no exit code but keeps the log.
    shell(LAUNCH / "detached.sh", "start", job, "sleep", "0.5")
    assert not (job / "exit_code").exists() and (job / "log.before").read_text().endswith("end\n")


# ------------------------------------------------------------------------------------------------ Cloud TPU

POD = ["--name=pod", "--zone=us-west4-a", "--type=v5litepod-16", "--workdir=gs://bucket/run"]
REMOTE_JOB = "--config=configs/medmcqa.py:qwen3_8b '--config.data.path=it'\\''s here' --workdir=gs://bucket/run"
AS_WORKER = 'NCA_JAX_EXTRA=tpu NCA_JAX_VENV="$HOME/nca_jax_venv" bash nca_jax/launch/'


def on_node(node, where, upload, files) -> dict[str, list[str]]:
    """The commands that set a TPU up, written down here once more."""
    ssh = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", node]
    unpack = "mkdir nca_jax && tar -xzf nca_jax_job/checkout.tar.gz -C nca_jax"
    start = f"{AS_WORKER}detached.sh start nca_jax_job bash nca_jax/launch/worker.sh {REMOTE_JOB}"
    return {
        "clear": [*ssh, "--worker=all", "--command=mkdir -p nca_jax_job && rm -rf nca_jax", *where],
        "copy": ["gcloud", "compute", "tpus", "tpu-vm", "scp"]
        + [f"{upload}/{file}" for file in files]
        + [f"{node}:nca_jax_job/", "--worker=all", *where],
        "install": [*ssh, "--worker=all", f"--command={unpack} && {AS_WORKER}worker.sh --install", *where],
        "start": [*ssh, "--worker=all", f"--command={start}", *where],
        "follow": [*ssh, "--worker=0", "--command=bash nca_jax/launch/detached.sh follow nca_jax_job", *where],
    }


def test_dry_run_of_a_pod_prints_every_command(shell):
    options = ["--spot", "--project=p", "--network=n", "--service-account=a@b", "--delete"]
    result = shell(LAUNCH / "tpu_pod.sh", "--dry-run", *POD, *options, *JOB, HF_TOKEN=TOKEN)
    assert result.returncode == 0 and result.stderr == "" and not shell.called.exists()
    where = ["--zone=us-west4-a", "--project=p", "--quiet"]
    upload = f"{shell.env['HOME']}/.cache/nca_jax/launch/pod"
    steps = on_node("pod", where, upload, ["checkout.tar.gz", "environment"])
    # Evaluated by the shell it is pasted into.
    token = '(umask 077 && printf "HF_TOKEN=%q\\n" "$HF_TOKEN" >"$0/environment")'
    assert commands(result.stdout) == [
        [
            *["gcloud", "compute", "tpus", "tpu-vm", "create", "pod", "--version=v2-alpha-tpuv5-lite"],
            *["--accelerator-type=v5litepod-16", *where, "--spot", "--network=n", "--service-account=a@b"],
        ],
        ["mkdir", "-p", upload],
        ["git", "-C", str(ROOT), "archive", "--format=tar.gz", f"--output={upload}/checkout.tar.gz", "HEAD"],
        ["bash", "-c", token, upload],
        steps["clear"],
        steps["copy"],
        ["rm", "-rf", upload],
        steps["install"],
        steps["start"],
        steps["follow"],
        ["gcloud", "storage", "cat", "gs://bucket/run/summary.txt"],
        ["gcloud", "compute", "tpus", "tpu-vm", "delete", "pod", *where],
    ]
    assert TOKEN not in result.stdout
    # And the remote command says to the host's shell what it should.
    words = shlex.split(steps["start"][7].removeprefix("--command="))
    assert words[-3:] == [*JOB[1:], "--workdir=gs://bucket/run"]


def test_dry_run_of_slices_asks_for_one_queued_resource_and_starts_all(shell):
    result = shell(LAUNCH / "tpu_multislice.sh", "--dry-run", "--slices=2", *POD, *JOB)
    assert result.returncode == 0 and result.stderr == "" and not shell.called.exists()
    where = ["--zone=us-west4-a", "--quiet"]
    upload = f"{shell.env['HOME']}/.cache/nca_jax/launch/pod"
    first, second = (on_node(f"pod-{i}", where, upload, ["checkout.tar.gz"]) for i in (0, 1))
    each = [step for name in ("clear", "copy", "install", "start") for step in (first[name], second[name])]
    each.insert(4, ["rm", "-rf", upload])
    assert commands(result.stdout) == [
        [
            *["gcloud", "compute", "tpus", "queued-resources", "create", "pod"],
            *[
                "--runtime-version=v2-alpha-tpuv5-lite",
                "--node-count=2",
                "--node-prefix=pod",
                "--accelerator-type=v5litepod-16",
                *where,
            ],
        ],
        ["mkdir", "-p", upload],
        ["git", "-C", str(ROOT), "archive", "--format=tar.gz", f"--output={upload}/checkout.tar.gz", "HEAD"],
        *each,
        first["follow"],
        ["gcloud", "storage", "cat", "gs://bucket/run/summary.txt"],
    ]
    assert "mesh" not in result.stdout
    # What the cloud has to answer stands in comments, with the commands that ask it.
    comments = "\n".join(line for line in result.stdout.splitlines() if line.startswith("#"))
    assert (
        "gcloud compute tpus queued-resources describe pod '--format=value(state.state)' --zone=us-west4-a" in comments
    )
    assert "gcloud compute tpus queued-resources delete pod --zone=us-west4-a --quiet --force" in comments


@pytest.mark.parametrize(
    "kind, image",
    [
        ("v5litepod-256", "v2-alpha-tpuv5-lite"),
        ("v5p-16", "v2-alpha-tpuv5"),
        ("v6e-8", "v2-alpha-tpuv6e"),
        ("v4-32", "tpu-ubuntu2204-base"),
    ],
)
def test_the_software_image_fits_the_type(shell, kind, image):
    options = [*POD[:2], f"--type={kind}", POD[3], "--queued"]
    create = commands(shell(LAUNCH / "tpu_pod.sh", "--dry-run", *options, *JOB).stdout)[0]
    assert create[4:8] == ["create", "pod", f"--runtime-version={image}", "--node-id=pod"]
    create = commands(shell(LAUNCH / "tpu_pod.sh", "--dry-run", *options, "--version=mine", *JOB).stdout)[0]
    assert create[6] == "--runtime-version=mine"


def test_a_repository_is_cloned_on_the_hosts(shell):
    result = shell(LAUNCH / "tpu_pod.sh", "--dry-run", *POD, "--repo=https://x/y z", "--ref=v1", *JOB)
    remote = [word.removeprefix("--command=") for line in commands(result.stdout) for word in line]
    clone = "git clone --quiet --depth=1 --branch=v1 'https://x/y z' nca_jax"
    assert f"{clone} && {AS_WORKER}worker.sh --install" in remote
    assert not any("scp" in line or "archive" in line for line in commands(result.stdout))


GCLOUD = r'''
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

world = Path(os.environ["FAKE"])
with open(world / "calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\n")
words = [a for a in sys.argv[1:] if not a.startswith("--")]
flags = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--") and "=" in a)

def state(name, kind="tpu-vm"):
    path = world / kind / name
    return path.read_text() if path.exists() else ""

def put(name, value, kind="tpu-vm"):
    (world / kind).mkdir(exist_ok=True)
    (world / kind / name).write_text(value)

def home(name):
    return Path((world / "homes" / name).read_text())

def boot(name):
    """A new machine, with nothing of the one before."""
    (world / "homes").mkdir(exist_ok=True)
    fresh = world / f"{name}-boot-{len(list(world.glob(name + '-boot-*')))}"
    shutil.copytree(world / "image", fresh)
    (world / "homes" / name).write_text(str(fresh))
    put(name, "READY")

if words[:2] == ["storage", "cat"]:
    print((world / "bucket" / words[2].rsplit("/", 1)[1]).read_text(), end="")
    sys.exit()
kind, verb, name = words[2:5]
nodes = [f"{name}-{i}" for i in range(int(flags.get("node-count", 0)))] or [name]
if verb == "create":
    if state(name, kind):
        sys.exit("it exists already")
    for node in nodes:
        boot(node)
    if kind == "queued-resources":
        put(name, "WAITING_FOR_RESOURCES", kind)
elif verb == "describe":
    if not state(name, kind):
        sys.exit("NOT_FOUND")
    print(state(name, kind))
    if state(name, kind) == "WAITING_FOR_RESOURCES":
        put(name, "ACTIVE", kind)
elif verb == "delete":
    (world / kind / name).unlink()
    for path in (world / "tpu-vm").glob(name + "*"):
        path.unlink()
elif verb == "scp":
    node, target = words[-1].split(":")
    for file in words[4:-1]:
        shutil.copy(file, home(node) / target)
elif verb == "ssh":
    if state(name) != "READY":
        sys.exit(255)
    passed = ("PATH", "FAKE", "TROUBLE", "NCA_JAX_PAUSE", "NCA_JAX_RETRIES")
    environment = {key: os.environ[key] for key in passed} | {"HOME": str(home(name)), "NODE": name}
    shell = ["bash", "-c", flags["command"]]
    command = subprocess.Popen(shell, cwd=home(name), env=environment, start_new_session=True)
    while command.poll() is None:
        if state(name) != "READY":
            os.killpg(command.pid, signal.SIGKILL)
            sys.exit(255)
        time.sleep(0.02)
    sys.exit(command.returncode)
'''

# The training on a fake host. TROUBLE says what becomes of its first run on the TPU of that name.
TRAINING = r"""#!/bin/bash
printf '%s\n' "$NODE $JAX_PLATFORMS ${HF_TOKEN:-none} $*" >>"$FAKE/runs"
echo "log of $NODE"
if [[ "$TROUBLE" == "$NODE "* ]] && mkdir "$FAKE/trouble" 2>/dev/null; then
  case "${TROUBLE#* }" in
    PREEMPTED) printf PREEMPTED >"$FAKE/tpu-vm/$NODE"; sleep 0.1; exit 2 ;;
    STOPPED) kill -TERM $PPID; sleep 0.2; exit 75 ;;
    *) exit "${TROUBLE#* }" ;;
  esac
fi
# A slice that is alone is of no use.
[[ "$TROUBLE" != *PREEMPTED || -e "$FAKE/trouble" ]] || { until [ -e "$FAKE/trouble" ]; do sleep 0.02; done; exit 1; }
mkdir -p "$FAKE/bucket"; echo "summary method=nca" >"$FAKE/bucket/summary.txt"
"""


@pytest.fixture
def cloud(shell, tmp_path):
    """A gcloud whose TPUs are directories, and a checkout of what lies here now; `launch` runs a script in it."""
    world, checkout = tmp_path / "world", tmp_path / "checkout"
    shutil.copytree(LAUNCH, checkout / "launch")
    for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt"):
        shutil.copy(ROOT / name, checkout)
    git = ["git", "-C", checkout, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    (checkout / "not_committed").touch()
    executable(world / "image/nca_jax_venv/bin/python", TRAINING)
    executable(shell.bin / "gcloud", f'#!/bin/sh\nexec {sys.executable} -I -S {tmp_path}/gcloud.py "$@"\n')
    (tmp_path / "gcloud.py").write_text(GCLOUD)

    def launch(script, *arguments, trouble="none", **environment):
        fake = {"FAKE": str(world), "TROUBLE": trouble, "NCA_JAX_PAUSE": "0", "NCA_JAX_RETRIES": "0"}
        return shell(checkout / "launch" / script, *arguments, **fake, **{"NCA_JAX_POLL": "0.1"} | environment)

    launch.runs = lambda: (world / "runs").read_text().splitlines()
    launch.calls = lambda: [json.loads(line) for line in (world / "calls").read_text().splitlines()]
    launch.verbs = lambda *verbs: [call[3] for call in launch.calls() if len(call) > 3 and call[3] in verbs]
    launch.world = world
    return launch


def test_a_preempted_pod_is_made_again_and_the_job_goes_on(cloud, shell):
    result = cloud("tpu_pod.sh", *POD, "--spot", "--delete", *JOB, trouble="pod PREEMPTED", HF_TOKEN=TOKEN)
    assert result.returncode == 0, result.stdout + result.stderr
    arguments = "-m nca_jax.main --config=configs/medmcqa.py:qwen3_8b --config.data.path=it's here"
    assert cloud.runs() == [f"pod tpu,cpu {TOKEN} {arguments} --workdir=gs://bucket/run"] * 2
    assert cloud.verbs("create", "delete") == ["create", "delete", "create", "delete"]
    creations = [call for call in cloud.calls() if call[3:4] == ["create"]]
    assert creations[0] == creations[1] and "--spot" in creations[0]
    assert result.stdout.endswith("log of pod\nsummary method=nca\n")
    # The code is what is committed.
    there = {path.name for path in (cloud.world / "pod-boot-1/nca_jax").iterdir()}
    assert there == {"launch", "requirements.txt", "requirements-dev.txt", "constraints.txt"}
    assert "uncommitted changes are not copied" in result.stdout
    # The token went through files that others cannot read, and nowhere else.
    assert TOKEN not in result.stdout + result.stderr + (cloud.world / "calls").read_text()
    assert (cloud.world / "pod-boot-1/nca_jax_job/environment").stat().st_mode & 0o077 == 0
    assert not (Path(shell.env["HOME"]) / ".cache/nca_jax/launch/pod").exists()


@pytest.mark.parametrize("code", [2, 5])
def test_a_pod_ends_with_the_code_of_the_job_and_stays(cloud, code):
    result = cloud("tpu_pod.sh", *POD, *JOB, trouble=f"pod {code}")
    assert result.returncode == code, result.stdout + result.stderr
    assert len(cloud.runs()) == 1 and cloud.verbs("create", "delete") == ["create"]
    assert "is still there and costs money" in result.stdout
    if code == 5:  # the same command again uses what is there, and starts anew what has ended
        assert cloud("tpu_pod.sh", *POD, *JOB, trouble=f"pod {code}").returncode == 0
        assert len(cloud.runs()) == 2 and cloud.verbs("create", "delete") == ["create"]


def test_a_job_that_was_told_to_stop_goes_on_where_the_pod_still_is(cloud):
    result = cloud("tpu_pod.sh", *POD, *JOB, trouble="pod STOPPED")
    assert result.returncode == 0 and len(cloud.runs()) == 2 and cloud.verbs("create") == ["create"]
    assert "the job was told to stop; going on" in result.stdout


def test_a_preempted_slice_makes_all_slices_anew(cloud):
    result = cloud("tpu_multislice.sh", "--slices=2", *POD, *JOB, trouble="pod-1 PREEMPTED")
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(run.split()[0] for run in cloud.runs()) == ["pod-0", "pod-0", "pod-1", "pod-1"]
    assert cloud.verbs("create", "delete") == ["create", "delete", "create"]
    deletion = next(call for call in cloud.calls() if call[3:4] == ["delete"])
    assert deletion[2:5] == ["queued-resources", "delete", "pod"] and "--force" in deletion
    assert "waiting for pod" in result.stdout and "summary method=nca" in result.stdout


def test_a_pod_that_cannot_be_made_is_not_asked_for_again(cloud):
    executable(cloud.world.parent / "bin/gcloud", '#!/bin/sh\necho "$@" >>"$FAKE/calls"; echo "no quota" >&2; exit 1\n')
    result = cloud("tpu_pod.sh", *POD, *JOB)
    assert result.returncode == 2 and "no quota\nerror: gcloud could not create pod" in result.stderr
    assert (cloud.world / "calls").read_text().count(" create ") == 1


# ------------------------------------------------------------------------------------------------ xpk, GKE

XPK = ["--name=nca", "--cluster=c", "--type=v5litepod-16", "--image=r/i:1", "--workdir=gs://bucket/run"]
GKE = ["--name=nca", "--image=r/i:1", "--accelerator=tpu-v5-lite-podslice", "--topology=4x4"]
GKE += ["--workdir=gs://bucket/run"]


def test_dry_run_of_xpk(shell):
    result = shell(LAUNCH / "xpk.sh", "--dry-run", *XPK, "--slices=2", "--zone=z", *JOB, HF_TOKEN=TOKEN)
    assert result.returncode == 0 and result.stderr == "" and not shell.called.exists()
    folder = f"{shell.env['HOME']}/.cache/nca_jax/launch"
    # The flags are those of xpk 1.16.0, whose parser was given this line.
    assert commands(result.stdout) == [
        ["mkdir", "-p", folder],
        ["bash", "-c", 'echo HF_TOKEN >"$0"', f"{folder}/nca.env"],
        [
            *["xpk", "workload", "create", "--workload=nca", "--cluster=c", "--zone=z", "--tpu-type=v5litepod-16"],
            *["--num-slices=2", "--docker-image=r/i:1", "--max-restarts=100", "--restart-on-exit-codes=75"],
            *["--termination-grace-period-seconds=300", f"--command=exec bash launch/worker.sh {REMOTE_JOB}"],
            f"--env-file={folder}/nca.env",
        ],
    ]
    assert TOKEN not in result.stdout


def test_xpk_gets_the_name_of_the_token_and_not_its_value(shell, tmp_path):
    executable(shell.bin / "xpk", f'#!/bin/sh\necho "$@" >{tmp_path}/xpk; cat "$HOME"/.cache/nca_jax/launch/nca.env\n')
    result = shell(LAUNCH / "xpk.sh", *XPK, *JOB, HF_TOKEN=TOKEN)
    assert result.returncode == 0 and result.stdout == "HF_TOKEN\n"
    assert "--workload=nca" in (tmp_path / "xpk").read_text() and TOKEN not in (tmp_path / "xpk").read_text()


def check_manifest(manifest: dict) -> None:
    """Raises ValidationError for what Kubernetes with JobSet would refuse."""
    jsonschema.validate(manifest, json.loads((ROOT / "tests/jobset_schema.json").read_text()))
    for replicated in manifest["spec"]["replicatedJobs"]:
        template = replicated["template"]
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": template.get("metadata", {}),
            "spec": template["spec"],
        }
        kubernetes_validate.validate(job, "1.32", strict=True)


def manifest_of(shell, *options) -> dict:
    result = shell(LAUNCH / "gke.sh", "--dry-run", *GKE[:3], *options, GKE[4], *JOB, HF_TOKEN=TOKEN)
    assert result.returncode == 0, result.stderr
    assert not shell.called.exists() and TOKEN not in result.stdout
    return yaml.safe_load(result.stdout)


@pytest.mark.parametrize(
    "options, slices, hosts, chips",
    [
        (["--topology=4x4"], 1, 4, 4),
        (["--topology=4x4", "--slices=3"], 3, 4, 4),
        (["--topology=2x2x4", "--slices=2"], 2, 4, 4),
        (["--topology=2x4", "--chips=8"], 1, 1, 8),
        (["--topology=1x1"], 1, 1, 1),
    ],
)
def test_the_manifest_is_valid_and_has_a_pod_per_host(shell, options, slices, hosts, chips):
    manifest = manifest_of(shell, *options)
    check_manifest(manifest)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["parallelism"], job["completions"]) == (slices, hosts, hosts)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": chips}}
    assert container["image"] == "r/i:1" and "command" not in container
    assert container["args"] == [*JOB[1:], "--workdir=gs://bucket/run"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": options[0].removeprefix("--topology="),
    }
    assert pod["terminationGracePeriodSeconds"] == 300 and pod["restartPolicy"] == "Never"
    # Peers are found by what GKE sets; a value of ours would be in its way.
    assert [variable["name"] for variable in container["env"]] == ["JAX_PLATFORMS", "HF_TOKEN"]


def test_options_reach_the_manifest(shell):
    options = ["--topology=4x4", "--spot", "--restarts=7", "--grace=25", "--service-account=sa", "--hf-secret=s"]
    manifest = manifest_of(shell, *options)
    check_manifest(manifest)
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert (pod["terminationGracePeriodSeconds"], pod["serviceAccountName"]) == (25, "sa")
    token = pod["containers"][0]["env"][1]["valueFrom"]["secretKeyRef"]
    assert token == {"name": "s", "key": "HF_TOKEN", "optional": True}


def outcome(manifest: dict, code: int | None) -> str:
    """What JobSet does when a container ends with a code, or (None) when its node goes away."""
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        if (code in exits["values"]) if exits else (code is None and conditions[0]["type"] == "DisruptionTarget"):
            # As Kubernetes words it.
            reason, message = (
                "PodFailurePolicy",
                f"Container worker for pod a/b failed matching FailJob rule at index {index}",
            )
            break
    assert job["backoffLimit"] == 0
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_exit_codes_decide_about_restarts_on_kubernetes(shell):
    manifest = manifest_of(shell, "--topology=4x4")
    assert outcome(manifest, 2) == "FailJobSet"
    assert outcome(manifest, 75) == "RestartJobSetAndIgnoreMaxRestarts"
    assert outcome(manifest, None) == "RestartJobSetAndIgnoreMaxRestarts"
    assert outcome(manifest, 1) == outcome(manifest, 137) == "RestartJobSet"


JOB_SPEC = ["spec", "replicatedJobs", 0, "template", "spec"]
POD_SPEC = [*JOB_SPEC, "template", "spec"]
MISTAKES = [
    (["spec", "replicatedJob"], []),
    (["spec", "failurePolicy", "maxRestarts"], "3"),
    (["spec", "failurePolicy", "rules", 0, "action"], "FailJob"),
    (["spec", "failurePolicy", "rules", 0, "name"], "input-that-cannot-work"),
    ([*JOB_SPEC, "backofLimit"], 0),
    ([*JOB_SPEC, "parallelism"], "4"),
    ([*JOB_SPEC, "podFailurePolicy", "rules", 0, "onExitCodes", "values"], ["2"]),
    ([*POD_SPEC, "gracePeriod"], 1),
    ([*POD_SPEC, "containers", 0, "arg"], []),
]


def test_the_schemas_notice_mistakes(shell):
    manifest = manifest_of(shell, "--topology=4x4")
    check_manifest(manifest)
    for path, value in MISTAKES:
        place = broken = copy.deepcopy(manifest)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            check_manifest(broken)


def test_gke_applies_what_the_dry_run_prints(shell, tmp_path):
    executable(shell.bin / "kubectl", f'#!/bin/sh\necho "$@"; cat >{tmp_path}/applied\n')
    result = shell(LAUNCH / "gke.sh", *GKE, "--namespace=lab", *JOB)
    assert result.returncode == 0 and result.stdout == "--namespace=lab apply -f -\n", result.stderr
    assert yaml.safe_load((tmp_path / "applied").read_text()) == manifest_of(shell, "--topology=4x4")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--topology=4by4"], "--topology=4by4 is not like 4x4"),
        (["--topology=3x3"], "--topology=3x3 has 9 chips, not a multiple of --chips=4"),
        (["--topology=2x2", "--slices=2"], "only slices of several hosts"),
        (["--topology=4x4", "--slices=two"], "two is not a number"),
        (["--topology=4x4", "--slices=0"], "--slices=0 leaves nothing"),
        (["--topology=4x4", "--name=Big_job"], "--name=Big_job is no name"),
    ],
)
def test_gke_refuses_what_cannot_work(shell, options, message):
    result = shell(LAUNCH / "gke.sh", "--dry-run", *GKE[:3], GKE[4], *options, *JOB)
    assert result.returncode == 2 and message in result.stderr and result.stdout == ""


# ------------------------------------------------------------------------------------------------ Slurm


def test_dry_run_of_slurm(shell):
    result = shell(LAUNCH / "slurm.sbatch", "--dry-run", "--workdir=/shared/run", *JOB)
    assert result.returncode == 0 and result.stderr == "" and not shell.called.exists()
    step = ["srun", "--kill-on-bad-exit=0", "--wait=600", "--gpu-bind=none", "--label"]
    worker = ["bash", "launch/worker.sh", *JOB[1:], "--workdir=/shared/run"]
    install, run = commands(result.stdout)
    assert install[0] == "bash" and Path(install[1]).samefile(LAUNCH / "worker.sh") and install[2:] == ["--install"]
    assert run == [*step, f"--chdir={ROOT}", *worker]
    result = shell(LAUNCH / "slurm.sbatch", "--dry-run", "--workdir=/shared/run", "--container=x.sif", *JOB)
    apptainer = ["apptainer", "exec", "--nv", "--bind=/shared/run:/shared/run", "--pwd=/opt/nca_jax", "x.sif"]
    assert commands(result.stdout) == [[*step, *apptainer, *worker]]
    options = ["--container=r/i:1", "--mounts=/shared:/shared,/cache:/cache"]
    result = shell(LAUNCH / "slurm.sbatch", "--dry-run", "--workdir=/shared/run", *options, *JOB)
    pyxis = ["--container-image=r/i:1", "--container-mounts=/shared:/shared,/cache:/cache"]
    assert commands(result.stdout) == [[*step, *pyxis, "--container-workdir=/opt/nca_jax", *worker]]


def test_slurm_is_asked_for_a_signal_a_requeue_and_a_process_per_gpu():
    asked = re.findall(r"^#SBATCH (--[a-z-]+)=?(.*)$", (LAUNCH / "slurm.sbatch").read_text(), re.M)
    asked = dict(asked)
    assert asked["--signal"] == "B:TERM@120" and "--requeue" in asked and asked["--open-mode"] == "append"
    assert asked["--ntasks-per-node"] == asked["--gpus-per-node"]


@pytest.fixture
def slurm(shell, tmp_path, python):
    """Slurm as the batch script sees it; the script lies where Slurm copies it to."""
    for name in ("scancel", "scontrol"):
        executable(shell.bin / name, f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/slurm\n')
    spooled = tmp_path / "spool/slurm_script"
    executable(spooled, (LAUNCH / "slurm.sbatch").read_text())
    environment = python(0) | {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "42"}

    def batch(step: str, **more):
        executable(shell.bin / "srun", f"#!/bin/bash\n{step}\n")
        return shell(spooled, "--workdir=/shared/run", *JOB, **environment, **more)

    batch.asked = lambda: (tmp_path / "slurm").read_text().splitlines() if (tmp_path / "slurm").exists() else []
    return batch


@pytest.mark.parametrize(
    "code, expected, asked", [(0, 0, []), (2, 2, []), (1, 1, []), (75, 75, ["scontrol requeue 42"])]
)
def test_slurm_requeues_what_was_stopped(slurm, code, expected, asked):
    result = slurm(f"exit {code}")
    assert result.returncode == expected and slurm.asked() == asked, result.stderr


@pytest.mark.parametrize("code", [75, 143])
def test_the_signal_of_slurm_reaches_the_step_and_the_job_comes_back(slurm, code):
    # The step: lets Slurm signal the batch script, its parent, and ends when scancel has been called.
    result = slurm(f"kill -TERM $PPID; until grep -qs scancel {slurm_log(slurm)}; do sleep 0.02; done; exit {code}")
    assert result.returncode == 75, result.stderr
    assert slurm.asked() == ["scancel --signal=TERM 42", "scontrol requeue 42"]


def slurm_log(slurm) -> str:
    return slurm.asked.__closure__[0].cell_contents / "slurm"


def test_slurm_with_idle_gpus_is_refused(slurm):
    result = slurm("exit 0", SLURM_NTASKS_PER_NODE="1", SLURM_GPUS_ON_NODE="8")
    assert result.returncode == 2 and result.stderr.startswith("error: 1 processes for 8 GPUs on a node")


def test_slurm_says_where_it_has_to_be_called(shell, tmp_path):
    result = shell(LAUNCH / "slurm.sbatch", SLURM_SUBMIT_DIR=str(tmp_path))
    assert result.returncode == 2 and result.stderr.startswith(f"error: there is no nca_jax in {tmp_path}")


# ------------------------------------------------------------------------------------------------ all of them


@pytest.mark.parametrize(
    "script, options",
    [
        ("tpu_pod.sh", POD),
        ("tpu_multislice.sh", ["--slices=2", *POD]),
        ("xpk.sh", XPK),
        ("gke.sh", GKE),
        ("slurm.sbatch", ["--workdir=/shared/run"]),
    ],
)
def test_what_is_missing_or_unknown_is_said_in_one_line(shell, script, options):
    cases = [
        ([o for o in options if o != left_out], f"{left_out.split('=')[0]}=... is missing") for left_out in options
    ]
    cases += [
        ([*options, "--nmae=x"], "there is no option --nmae"),
        ([*options, "--workdir"], "--workdir needs a value"),
        ([*options, "extra"], "extra is not an option"),
    ]
    cases = [([*given, *JOB], message) for given, message in cases]
    cases += [(options, "--config=... is missing"), ([*options, *JOB, "--workdir=x"], "--workdir=... belongs before")]
    for given, message in cases:
        result = shell(LAUNCH / script, "--dry-run", *given)
        assert (result.returncode, result.stdout) == (2, ""), (given, result.stdout)
        assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not shell.called.exists()


@pytest.mark.parametrize("script", ["tpu_pod.sh", "tpu_multislice.sh", "xpk.sh", "gke.sh", "slurm.sbatch"])
def test_help_names_every_option(shell, script):
    result = shell(LAUNCH / script, "--help")
    assert result.returncode == 0 and "--dry-run" in result.stdout and "#" not in result.stdout
    accepted = re.search(r'parse_options "([^"]*)"\s*\\?\s*"([^"]*)"', (LAUNCH / script).read_text())
    for name in (" ".join(accepted.groups()) if accepted else "").split():
        assert f"--{name}" in result.stdout, name


@pytest.mark.parametrize(
    "options, message",
    [
        (["--slices=1", *POD], "--slices=1 is not a number from 2 on"),
        (["--slices=2", *POD[:2], "--type=v9-8", POD[3]], "--type=v9-8 needs is not known here: pass --version"),
        (["--slices=2", *POD[:3], "--workdir=runs/x"], "--workdir=runs/x is not shared by the hosts"),
    ],
)
def test_slices_that_cannot_work_are_refused(shell, options, message):
    result = shell(LAUNCH / "tpu_multislice.sh", "--dry-run", *options, *JOB)
    assert result.returncode == 2 and message in result.stderr and result.stdout == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_the_linter(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    linter = Path(sys.executable).with_name("shellcheck")
    result = subprocess.run([linter, "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_image_holds_what_the_worker_script_needs():
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((ROOT / path).exists() for path in copied)
    sourced = re.findall(r"source=(\S+\.sh)", (LAUNCH / "worker.sh").read_text())
    assert {"launch/worker.sh", *(f"launch/{name}" for name in sourced)} <= set(copied)
    assert any("NCA_JAX_VENV=/usr/local" in line for line in lines)
    assert lines[-1] == 'ENTRYPOINT ["python", "-m", "nca_jax.main"]'


def test_the_examples_of_the_documentation_run_dry(shell):
    text = (ROOT / "docs/launch.md").read_text().replace("\\\n", " ")
    examples = [shlex.split(line) for line in re.findall(r"^    ((?:bash|sbatch) .*launch/.*--workdir.*)$", text, re.M)]
    seen = set()
    for words in examples:
        place = next(i for i, word in enumerate(words) if word.startswith("launch/"))
        result = shell(ROOT / words[place], "--dry-run", *words[place + 1 :])
        assert result.returncode == 0, result.stderr
        seen.add(words[place])
    scripts = {"tpu_pod.sh", "tpu_multislice.sh", "xpk.sh", "gke.sh", "slurm.sbatch"}
    assert seen == {f"launch/{name}" for name in scripts}
