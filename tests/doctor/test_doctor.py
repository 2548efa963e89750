"""`doctor` reports every fault of a machine as a line with a remedy, never crashes, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from sampled import long

from nash_mhc.config.schema import ConfigError
from nash_mhc.doctor import __main__ as doctor
from nash_mhc.doctor import checks
from nash_mhc.doctor.findings import Finding

ROOT = Path(__file__).parents[2]
# Slow to import and not needed by most tests: empty modules replace them.
HEAVY = ("equinox", "optax", "clu", "grain", "transformers", "tensorboard", "pyarrow", "beartype", "jaxtyping", "tokenizers")


class Machine:
    """A machine with extra packages in front of the real ones, and a separate directory for temporary files."""

    def __init__(self, folder: Path) -> None:
        self.packages, self.temporary, self.here = folder / "packages", folder / "tmp", folder / "here"
        for one in (self.packages, self.temporary, self.here):
            one.mkdir()

    def has(self, **modules: str) -> None:
        for name, text in modules.items():
            file = self.packages / f"{name.replace('__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def is_light(self) -> None:
        self.has(**dict.fromkeys(HEAVY, ""), orbax____init__="", orbax__checkpoint="")

    def start(self, *argv: str, **env: str | None) -> subprocess.Popen:
        given = os.environ | {"PYTHONPATH": f"{self.packages}:{ROOT}", "TMPDIR": str(self.temporary)} | env
        kept = {name: value for name, value in given.items() if value is not None}
        command = [sys.executable, "-m", "nash_mhc", "doctor", *argv]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=kept, cwd=self.here, **out)

    def examine(self, *argv: str, **env: str | None) -> tuple[int, dict[str, list[tuple[str, str]]]]:
        """Return (exit code, check -> [(status, text)]) and check what must hold for every run of the command."""
        there = sorted(self.here.iterdir())
        out, err = (process := self.start(*argv, **env)).communicate(timeout=300)
        assert err == ""
        assert "Traceback" not in out
        assert sorted(self.here.iterdir()) == there
        assert not list(self.temporary.iterdir())
        found: dict[str, list[tuple[str, str]]] = {}
        for line in out.splitlines()[:-1]:
            status, (check, _, text) = line[:9].strip(), line[11:].partition(": ")
            assert status in ("ok", "warning", "problem", "not tried", "...")
            found.setdefault(check, []).append((status, text))
        return process.returncode, found


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def problems(found: dict[str, list[tuple[str, str]]]) -> list[str]:
    return [check for check, lines in found.items() for status, _ in lines if status == "problem"]


def test_a_healthy_machine_is_found_to_be_so(here: Machine, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    code, found = here.examine("runs/new", "--json", str(file), XLA_FLAGS=flags)
    assert (code, problems(found)) == (0, [])
    assert [status for status, _ in found["smoke test"]] == ["ok"]
    written = json.loads(file.read_text())
    assert written["exit_code"] == 0
    figures = {one["check"]: one["figures"] for one in written["findings"] if one["status"] in ("ok", "warning")}
    assert {"packages", "accelerators", "imports", "storage"} <= set(figures)
    assert "jax" in figures["packages"]
    assert (figures["devices"]["platform"], figures["devices"]["count"]) == ("cpu", 2)
    assert min(figures["matmul"]["rates"]) > 1e9
    assert figures["all-reduce"]["devices"] == 2
    losses = figures["smoke test"]["losses"]
    assert len(losses) == 3 and 7 > losses[0] > losses[1] > losses[2] > 0


def test_a_folder_that_cannot_be_written_is_one_problem(here: Machine) -> None:
    here.is_light()
    (here.here / "notes.txt").write_text("mine")
    code, found = here.examine("notes.txt/run", "--quick")
    assert (code, problems(found)) == (1, ["storage"])
    ((_, text),) = found["storage"]
    assert "Not a directory" in text and "use another folder" in text
    assert found["matmul"][0][0] == "ok"  # the other checks still run


HIDDEN = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"optax", "rich", "yaml"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def test_missing_and_broken_packages_are_named(here: Machine) -> None:
    here.is_light()
    here.has(sitecustomize=HIDDEN)
    code, found = here.examine()
    assert (code, problems(found)) == (1, ["imports"])
    assert "No module named" in found["imports"][0][1] and "pip install --force-reinstall" in found["imports"][0][1]
    assert found["smoke test"] == [("not tried", "because of imports")]

    here.has(sitecustomize="", optax="raise AttributeError('this optax wants another jax')")
    code, found = here.examine()
    assert (code, problems(found)) == (1, ["imports"])
    assert "another jax" in found["imports"][0][1]
    assert "pip install --force-reinstall optax" in found["imports"][0][1]


def test_a_missing_platform_is_reported_with_the_variable_that_asks_for_it(here: Machine) -> None:
    here.is_light()
    code, found = here.examine(JAX_PLATFORMS="cuda")
    assert (code, problems(found)) == (1, ["devices"])
    assert "JAX_PLATFORMS is cuda: unset it" in found["devices"][0][1]
    assert found["smoke test"] == [("not tried", "because of devices")]


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        # As a driver does: in C, holding the lock that all other threads of the process need.
        ("ctypes.PyDLL(None).sleep(1000)", "no answer within 40 s while asking JAX for its devices"),
        *long(("os.kill(os.getpid(), signal.SIGSEGV)", "the process died of SIGSEGV while asking JAX for its devices")),
    ],
)
def test_a_device_that_hangs_or_crashes_the_process_is_a_line(here: Machine, does: str, expected: str) -> None:
    here.is_light()
    pid = here.packages / "pid"
    plugin = f"import ctypes, os, signal\ndef initialize():\n    open({str(pid)!r}, 'w').write(str(os.getpid()))\n    {does}\n"
    here.has(jax_plugins__stuck=plugin)
    code, found = here.examine("--timeout", "40", JAX_PLATFORMS=None)
    assert (code, problems(found)) == (1, ["devices"])
    assert expected in found["devices"][0][1] and "end other processes that hold the device" in found["devices"][0][1]
    assert [found[check][0][0] for check in ("matmul", "all-reduce", "smoke test")] == ["not tried"] * 3
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_doctor_that_is_killed_takes_its_processes_along(here: Machine) -> None:
    here.is_light()
    pid = here.packages / "pid"
    wait = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1e6)\n"
    here.has(optax=wait)
    process = here.start()
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    end = time.monotonic() + 60
    while (
        Path(f"/proc/{pid.read_text()}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid.read_text()}/status").read_text()
    ):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_driver_that_hangs_nvidia_smi_is_a_line(here: Machine) -> None:
    here.is_light()
    tool = here.packages / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 1000\n")
    tool.chmod(0o755)
    code, found = here.examine("--quick", "--timeout", "60", PATH=f"{here.packages}:{os.environ['PATH']}")
    assert (code, problems(found)) == (0, [])  # a run can use the CPU
    assert found["accelerators"][0][0] == "warning"
    assert "no answer within 15 s from nvidia-smi; check the driver" in found["accelerators"][0][1]
    assert found["devices"][0][0] == "ok"


def test_wrong_flags_are_one_line_each(tmp_path: Path) -> None:
    for argv, expected in [
        (["--quik"], "unknown flag --quik; did you mean --quick"),
        (["a", "b"], "unexpected argument 'b'; "),
        (["--timeout", "0"], "--timeout 0: must be"),
        (["--quick", "device_type=tpu"], "'device_type=tpu': .* doctor takes no run settings"),
        (["tpu"], "'tpu': no such directory; .*runs/NAME"),
        (["--json", str(tmp_path / "no" / "file.json")], "no/file.json: cannot be written"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            doctor.parse(argv)


def test_an_unexpected_error_in_a_check_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise ZeroDivisionError("by a file of the system")

    monkeypatch.setattr(doctor, "check_accelerators", broken)
    lines = doctor.Lines()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    doctor.examine(doctor.parse(["--quick"]), lines)
    checks = {finding.check: (finding.status, finding.text) for finding in lines.findings}
    assert checks["accelerators"][0] == "warning" and "by a file of the system" in checks["accelerators"][1]
    assert checks["packages"][0] == "ok"
    assert checks["storage"][0] == "problem" and "gone" in checks["storage"][1]


def installed(folder: Path, **versions: str) -> None:
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_incompatible_versions_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, jaxlib="0.4.1", rich="1.0", jax_cuda13_plugin="0.4.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [finding for finding in checks.check_packages() if finding.status != "ok"]
    lines = "\n".join(f"{finding.status} {finding.text}; {finding.remedy}" for finding in found)
    assert "problem rich is 1.0, and nash_mhc needs >=13.7; pip install 'rich>=13.7'" in lines
    assert "problem jaxlib is 0.4.1, and jax needs" in lines
    assert "problem jax-cuda13-plugin is 0.4.0, and jaxlib is 0.4.1: JAX would not use it; pip install --upgrade jax" in lines


def test_an_accelerator_that_jax_does_not_see_is_reported_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100'\necho 'NVIDIA H100'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (found,) = checks.check_accelerators()
    assert (found.status, found.text) == ("ok", "2 x NVIDIA H100")

    def compared(gpus: list[str], seen: dict, parts: tuple[str, ...] = (), **env: str) -> list[tuple[str, str]]:
        return [(f.text, f.remedy) for f in checks.check_hidden_gpus(gpus, seen, dict.fromkeys(parts, "1"), env)]

    gpus, cpu, cuda = found.figures["gpus"], {"platform": "cpu", "local": 1}, ("jax-cuda13-plugin",)
    assert compared(gpus, cpu, cuda, JAX_PLATFORMS="cpu")[0][1] == "unset JAX_PLATFORMS"
    assert compared(gpus, cpu, cuda, CUDA_VISIBLE_DEVICES="")[0][1] == "unset CUDA_VISIBLE_DEVICES"
    assert "pip install 'nash_mhc[cuda]'" in compared(gpus, cpu)[0][1]
    assert "JAX does not say why" in compared(gpus, cpu, cuda)[0][0]
    assert compared(gpus, {"platform": "gpu", "local": 1}, cuda, CUDA_VISIBLE_DEVICES="0")[0][0] == "JAX sees 1 of 2 GPUs"
    assert compared(gpus, {"platform": "gpu", "local": 2}, cuda) == []
    ((text, _),) = compared([], cpu, cuda)
    assert text == "JAX is installed for CUDA, but there is no GPU"

    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    (found,) = checks.check_accelerators()
    assert found.status == "warning" and "version mismatch" in found.text and "driver" in found.remedy
