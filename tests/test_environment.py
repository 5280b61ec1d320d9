"""What is kept of where a command ran."""

import datetime
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax

from nca_jax.environment import environment


def test_versions_devices_and_time():
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    found = environment()
    assert before <= datetime.datetime.fromisoformat(found["started"]) <= datetime.datetime.now(datetime.UTC)
    assert found["packages"]["jax"] == metadata.version("jax") == jax.__version__
    assert found["devices"] == {"kind": "cpu", "count": len(jax.devices()), "processes": 1}
    assert json.loads(json.dumps(found)) == found


def test_the_command_is_the_one_that_was_given(tmp_path):
    package = tmp_path / "given"
    package.mkdir()
    (package / "__init__.py").touch()
    program = "from nca_jax.environment import environment\nimport json\nprint(json.dumps(environment()['command']))\n"
    (package / "__main__.py").write_text(program)
    (tmp_path / "script.py").write_text(program)
    search = f"{tmp_path}:{Path(__file__).parents[1]}"

    def command(*arguments: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={"PYTHONPATH": search, "JAX_PLATFORMS": "cpu", "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    assert command("-m", "given", "--a=b c") == ["python", "-m", "given", "--a=b c"]
    assert command(f"{tmp_path}/script.py", "x") == ["python", f"{tmp_path}/script.py", "x"]
