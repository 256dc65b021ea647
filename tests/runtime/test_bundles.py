"""Bundles of kernels: a machine without NVRTC and without a home runs what is in one, and says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import leanconv
from leanconv import ConvProblem
from leanconv.call.choose import choose
from leanconv.cli import doctor
from leanconv.perf import tables
from leanconv.perf.tables import Entry, Table, Timed
from leanconv.plan import Launch, Target
from leanconv.problem import Problem
from leanconv.runtime import bundle, cache, compile, driver, errors, launch
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.words import dense_filter, format_problem, parse_problem
from tests.runtime.fake_driver import FakeDriver, code_of

ROOT = Path(__file__).resolve().parents[2]
LAYER = ConvProblem(2, 3, 9, 11, 4, 3, 3, padding=(1, 1, 1, 1))
FILTER = dense_filter(1, 33, 41, 5, 5)
TARGET = Target("sm_90a", 132, 227 * 1024, 228 * 1024, model="NVIDIA H200")


@pytest.fixture
def compiles(some_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A compiler whose code the driver of tests runs: what it was asked for. No GPU; kernels are kept in a folder."""
    asked: list[str] = []

    def compile_launch(each: Launch, arch: str) -> compile.Compiled:
        asked.append(each.symbol)
        return code_of(each, arch)

    monkeypatch.setattr(compile, "compile_launch", compile_launch)
    monkeypatch.setattr("leanconv.call.precompile.cuda_version", lambda: 13050)
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(errors, "_warned", set())
    monkeypatch.setattr(tables, "_tables", {})
    on_driver(monkeypatch, None)
    return asked


def on_driver(monkeypatch: pytest.MonkeyPatch, version: int | None) -> None:
    """A driver of this version, or none."""

    def found() -> Any:
        if version is None:
            raise CudaUnavailableError("no NVIDIA driver was found (a test)")
        return FakeDriver(version)

    monkeypatch.setattr(launch, "driver", found)
    monkeypatch.setattr(bundle, "driver", found)
    monkeypatch.setattr(launch, "_devices", {})


def launches(problem: Problem, target: Target = TARGET) -> list[Launch]:
    return [each for each in choose(problem, target).plan(problem, target).all_launches if each.grid]


def made(path: Path, *problems: Problem, monkeypatch: pytest.MonkeyPatch | None = None) -> Path:
    leanconv.precompile(problems, bundle=path, progress=False)
    if monkeypatch is not None:
        monkeypatch.setenv("LEANCONV_BUNDLE", str(path))
    return path


#: Runs a layer and a filter of a bundle on the driver of tests, where NVRTC and a home are missing; then another layer.
PROCESS = """
import json, os, sys
import numpy as np

listed = os.listdir
os.listdir = lambda folder=".": [name for name in listed(folder) if not name.startswith("nvidia_cuda_nvrtc")]
sys.modules["cuda"] = None

from leanconv.runtime import driver
from tests.runtime.fake_driver import FakeDriver
H200 = {16: 132, 75: 9, 76: 0, 81: 233472, 82: 65536, 97: 232448, 13: 1980000, 36: 0, 37: 6016}
fake = FakeDriver(attributes={0: H200}, names=("NVIDIA H200",))
fake.most_bytes = 1 << 20
driver._open_library = lambda: fake

import leanconv
from leanconv.cli import doctor
x, w = np.ones((2, 3, 9, 11), np.float32), np.ones((4, 3, 3, 3), np.float32)
leanconv.conv2d(x, w, padding=1, device="cuda")
leanconv.filter2d(np.ones((33, 41), np.float32), np.ones((5, 5), np.float32), device="cuda")
ran = [each.symbol for each in fake.started]
try:
    leanconv.conv2d(x, w, stride=2, device="cuda")
    missing = ""
except leanconv.CudaUnavailableError as error:
    missing = str(error)
findings = [*doctor._bundles(), doctor._store(), doctor._compiler(leanconv.runtime.launch.open_device(0).target, True)]
told = {each.name: (each.state, each.text) for each in findings}
ready = str(leanconv.precompile([leanconv.ConvProblem(2, 3, 9, 11, 4, 3, 3, padding=(1, 1, 1, 1))], progress=False))
print(json.dumps([ran, missing, told, ready]))
"""


def test_a_machine_without_compiler_and_home_runs_a_bundle(compiles: list[str], tmp_path: Path) -> None:
    path = made(tmp_path / "kernels.zip", LAYER, FILTER)
    assert compiles
    home = tmp_path / "home"
    home.touch()  # no folder: nothing can be made below it, by root neither
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LEANCONV", "XDG"))}
    environment |= {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "HOME": str(home),
        "LEANCONV_BUNDLE": str(path),
    }
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROCESS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ran, missing, told, ready = json.loads(done.stdout)
    wanted = [each.symbol for problem in (LAYER, FILTER) for each in launches(problem)]
    assert set(ran) <= set(wanted) and len(ran) >= 2
    other = format_problem(replace(LAYER, stride=(2, 2), padding=(0, 0, 0, 0)))
    held = f"{path}: {len(wanted)} kernels of 2 problems for NVIDIA H200 (sm_90a)"
    assert missing.startswith(f"{other} cannot be compiled: ")
    assert f"is in no bundle ({held}), and the CUDA compiler NVRTC" in missing
    assert told["bundle of kernels"] == ["ok", f"{held}, made by leanconv {leanconv.__version__} with CUDA 13.5"]
    assert told["compiling kernels"][0] == "absent" and told["cache of kernels"][0] == "broken"
    assert f"{len(launches(LAYER))} kernels of 1 problems are ready: 0 compiled" in ready


def test_a_bundle_holds_what_nvrtc_made(nvrtc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_driver(monkeypatch, None)
    path = made(tmp_path / "kernels.zip", FILTER, monkeypatch=monkeypatch)
    (each,) = launches(FILTER)
    kept = cache._from_folder(each, "sm_90a")
    monkeypatch.setenv("LEANCONV_NO_CACHE", "1")
    monkeypatch.setattr(compile, "compile_launch", None)
    assert cache.compiled(each, "sm_90a") == kept and kept.cubin[:4] == b"\x7fELF"
    (found,) = bundle.in_use("sm_90a")
    assert found.cuda == compile.cuda_version() and found.compiler == cache.compiler_version()
    with zipfile.ZipFile(path) as archive:  # unpacked, it is a folder of compiled kernels
        archive.extractall(tmp_path / "folder")
    monkeypatch.delenv("LEANCONV_NO_CACHE")
    monkeypatch.delenv("LEANCONV_BUNDLE")
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path / "folder"))
    assert cache.compiled(each, "sm_90a") == kept


def test_a_bundle_grows_and_is_the_same_file_for_the_same_kernels(compiles: list[str], tmp_path: Path) -> None:
    path = made(tmp_path / "kernels.zip", LAYER)
    done = leanconv.precompile([FILTER, LAYER], bundle=path, progress=False)
    count = len(launches(LAYER)) + len(launches(FILTER))
    assert str(done).startswith(f"{count} kernels of 2 problems are in {path}, which has {count} kernels of 2 problems")
    again = made(tmp_path / "again.zip", LAYER, FILTER)
    assert path.read_bytes() == again.read_bytes()
    assert parse_problem(bundle.Bundle.read(path).problems[1]) == FILTER


def test_a_bundle_has_what_runs_where_filters_stay_packed(compiles: list[str], tmp_path: Path) -> None:
    """TF32: a launch before rounds filters that stay so, and a tile rounds others in place."""
    problem = parse_problem("conv:n1,c256,h14,k1024,r1,NHWC,tf32")
    both = {
        each
        for kept in ("", "same bits", "quickest")
        for each in choose(problem, TARGET, kept=kept).plan(problem, TARGET).all_launches
    }
    assert len(both) == 3
    made(tmp_path / "kernels.zip", problem)
    assert sorted(compiles) == sorted(each.symbol for each in both)


def test_what_a_program_has_compiled_is_bundled(
    compiles: list[str], run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "kernels.zip"
    code, _, err = run("cache", "bundle", path)
    assert code == 2 and "the folder of compiled kernels is empty" in err
    assert run("cache", "bundle")[0] == run("cache", "size", path)[0] == 2
    for each in launches(LAYER):
        cache.compiled(each, "sm_90a")
        cache.compiled(each, "sm_80")
    count = 2 * len(launches(LAYER))
    code, out, _ = run("cache", "bundle", path)
    assert code == 0 and out == f"{path} has {count} kernels for a GPU (sm_80), NVIDIA H200 (sm_90a)\n"
    monkeypatch.setenv("LEANCONV_BUNDLE", str(path))
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path / "other"))
    compiles.clear()
    assert [cache.compiled(each, "sm_80").arch for each in launches(LAYER)] == ["sm_80"] * (count // 2)
    assert not compiles and not (tmp_path / "other").exists()


#: in the entry of a zip file's directory: the place of a byte, and one that zipfile refuses or leanconv does not write
DAMAGE = {"version needed": (6, 0xFF), "encrypted": (8, 1), "patched": (8, 32), "method": (10, 99), "lzma": (10, 14)}


@pytest.mark.filterwarnings("ignore:the bundle of kernels .*good.zip")
@pytest.mark.parametrize(
    "what, arch, driver_version, why",
    [
        ("leanconv", "sm_90a", None, "it was made by leanconv 0.0.9, and this is "),
        ("gpu", "sm_80", None, r"it is for NVIDIA H200 \(sm_90a\), and this GPU is sm_80"),
        ("driver", "sm_90a", 12080, r"its compiler is of CUDA 13.5, and the driver supports CUDA 12.8"),
        ("format", "sm_90a", None, "damaged one: its format is 2, not 1"),
        ("no zip", "sm_90a", None, "is no bundle of kernels, or a damaged one: "),
        ("cut", "sm_90a", None, "is no bundle of kernels, or a damaged one: "),
        ("absent", "sm_90a", None, "No such file"),
        ("version needed", "sm_90a", None, "damaged one: zip file version"),
        ("encrypted", "sm_90a", None, "damaged one: .*is encrypted"),
        ("patched", "sm_90a", None, r"damaged one: .*patched data \(flag bit 5\)"),
        ("method", "sm_90a", None, "damaged one: manifest.json is compressed in another way"),
        ("lzma", "sm_90a", None, "damaged one: manifest.json is compressed in another way"),
        ("infinite", "sm_90a", None, "damaged one: cannot convert float infinity"),
    ],
)
def test_what_does_not_fit_is_named_once_and_the_rest_runs(
    what: str, arch: str, driver_version: int | None, why: str, compiles: list[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    path, good = made(tmp_path / "kernels.zip", LAYER), made(tmp_path / "good.zip", FILTER)
    content = path.read_bytes()
    other_entry = {"leanconv": {"leanconv": "0.0.9"}, "format": {"format": 2}, "infinite": {"cuda": float("inf")}}
    if what in other_entry:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("manifest.json"))
        about |= other_entry[what]
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("manifest.json", json.dumps(about))
    elif what == "no zip":
        path.write_bytes(b"PK no zip")
    elif what == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif what == "absent":
        path.unlink()
    elif what in DAMAGE:
        entry = bytearray(content)  # the manifest comes first in the directory, too
        offset, entry_byte = DAMAGE[what]
        entry[content.index(b"PK\1\2") + offset] = entry_byte
        path.write_bytes(entry)
    monkeypatch.setenv("LEANCONV_BUNDLE", f"{path}{os.pathsep}{good}")
    on_driver(monkeypatch, driver_version)
    (kernel, *_), (other, *_) = launches(LAYER), launches(FILTER)
    compiles.clear()
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.warns(RuntimeWarning, match=f"the bundle of kernels .*kernels.zip is not used: .*{why}"):
        assert cache.compiled(kernel, arch) == code_of(kernel, arch)
    assert compiles == [kernel.symbol], "it is compiled instead"
    with warnings.catch_warnings():
        if what not in ("gpu", "driver"):  # which hold for the other one too
            warnings.simplefilter("error")
            assert cache.compiled(other, arch) == code_of(other, arch) and len(compiles) == 1
    monkeypatch.setattr(doctor, "why_no_gpu", lambda: None)
    monkeypatch.setattr(launch, "open_device", lambda index: type("Device", (), {"target": Target(arch, 132)}))
    first, second = doctor._bundles()
    assert first.state == "broken" and second.state == ("broken" if what in ("gpu", "driver") else "ok")


def test_a_damaged_kernel_is_a_miss_and_named_once(
    compiles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = made(tmp_path / "kernels.zip", LAYER, FILTER, monkeypatch=monkeypatch)
    found = bundle.Bundle.read(path)
    content = bytearray(path.read_bytes())
    for name in found.kernels:
        content[found.members[name][0] + 120] ^= 0x55
    path.write_bytes(content)
    compiles.clear()
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path / "empty"))
    kernel, other = launches(LAYER)[0], launches(FILTER)[0]
    with pytest.warns(RuntimeWarning, match=r"kernels/.*\.cubin in the bundle .*kernels.zip cannot be used"):
        assert cache.compiled(kernel, "sm_90a") == code_of(kernel, "sm_90a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.compiled(other, "sm_90a") == code_of(other, "sm_90a")
    assert len(compiles) == 2


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A bundle of one kernel and one table."""
    kernel = compile.Compiled(b"code" * 8, "direct", "sm_90a", 40, 0, 0)
    gpu, table = ("NVIDIA H200", "sm_90a"), '{"format": 1, "gpu": {"name": "NVIDIA H200"}, "problems": {}}'
    bundle.write(tmp_path / "k.zip", "nvrtc 13.0", 13050, {"0": kernel}, [gpu], (), {"nvidia-h200.json": table})
    return tmp_path / "k.zip"


def test_whatever_byte_is_damaged_nothing_else_is_read(small: Path) -> None:
    content, whole = small.read_bytes(), bundle.Bundle.read(small)
    held = {name: whole.content(name) for name in whole.members}
    for place in range(len(content)):
        for flipped in (1, 32, 255):
            damaged = bytearray(content)
            damaged[place] ^= flipped
            small.write_bytes(damaged)
            try:
                found = bundle.Bundle.read(small)
            except (ValueError, OSError):
                continue
            for name in found.members:
                try:
                    read = found.content(name)
                except (OSError, *bundle._DAMAGED):
                    continue
                assert name not in held or read == held[name], (place, flipped, name)


def test_a_damaged_table_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANCONV_BUNDLE", str(small))
    monkeypatch.setattr(errors, "_warned", set())
    monkeypatch.setattr(tables, "_tables", {})
    with zipfile.ZipFile(small) as archive:
        members = {each.filename: archive.read(each) for each in archive.infolist()}
    with zipfile.ZipFile(small, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    path = small / "nvidia-h200.json"
    assert bundle.table(path) == members["tables/nvidia-h200.json"]
    small.write_bytes(small.read_bytes().replace(b'"format": 1, "gpu"', b'"format": 3, "gpu"'))
    with pytest.raises(ValueError, match=f"{path} cannot be read: its checksum differs"):
        bundle.table(path)
    with pytest.warns(RuntimeWarning, match=f"a table of tuned problems is not used: {path} cannot be read"):
        assert tables.table_of(small, TARGET) is None
    wrong = rf"tables/nvidia-h200.json in {small} is damaged: its checksum differs; remove {small}, or name another"
    with pytest.raises(ValueError, match=wrong):
        bundle.write(small, "nvrtc 13.0", 13050, {}, [])


def test_a_bundle_in_a_home_that_cannot_be_found(
    compiles: list[str], run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = made(tmp_path / "good.zip", LAYER)
    named, said = "~no-such-user/kernels.zip", "is in a home folder that cannot be found"
    monkeypatch.chdir(tmp_path)
    Path(named).parent.mkdir()
    Path(named).write_bytes(good.read_bytes())  # a folder of that name is not what was meant
    monkeypatch.setenv("LEANCONV_BUNDLE", f"{named}{os.pathsep}{good}")
    with pytest.warns(RuntimeWarning, match=f"the bundle of kernels {named} is not used: {named} {said}"):
        assert [each.path for each in bundle.in_use("sm_90a")] == [good]
    first, second = doctor._bundles()
    assert (first.state, second.state) == ("broken", "ok") and said in first.text
    code, out, _ = run("explain", format_problem(LAYER), "--device", "cuda")
    assert code == 0 and out
    assert run("tune", "--show")[0] == 0


def test_a_bundle_of_others_is_not_added_to(
    compiles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = made(tmp_path / "kernels.zip", LAYER)
    before = path.read_bytes()
    monkeypatch.setattr(cache, "compiler_version", lambda: "nvrtc 14")
    with pytest.raises(ValueError, match="is of the compiler nvrtc 13.0, and this is nvrtc 14: remove it, or name ano"):
        made(path, FILTER)
    assert path.read_bytes() == before
    (tmp_path / "text.zip").write_text("a text")
    with pytest.raises(ValueError, match="is no bundle of kernels"):
        made(tmp_path / "text.zip", FILTER)


def test_a_replaced_bundle_is_read_anew(compiles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = made(tmp_path / "kernels.zip", LAYER, monkeypatch=monkeypatch)
    monkeypatch.setenv("LEANCONV_NO_CACHE", "1")
    cache.compiled(launches(LAYER)[0], "sm_90a")
    made(path, FILTER)
    compiles.clear()
    assert cache.compiled(launches(FILTER)[0], "sm_90a") and not compiles


def test_tuned_problems_go_with_their_kernels(
    compiles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the table is missing, another kernel is chosen than the one in the bundle."""
    monkeypatch.setenv("LEANCONV_TUNING_DIR", str(tmp_path / "tables"))
    usual = choose(LAYER, TARGET)
    other = next(
        each for name in ("im2win_fused", "direct_tiled", "direct") if (each := choose(LAYER, TARGET, name)) != usual
    )
    assert other.config is not None and other.algorithm.stem != usual.algorithm.stem
    timed = Timed(
        other.algorithm.stem, dict(other.config.constants()), 1.0, tables.kernels_of(other.plan(LAYER, TARGET))
    )
    entry = Entry((timed,), {"auto": timed})
    path_of = tables.path_of(tmp_path / "tables", TARGET.model)
    tables.update(path_of, Table(tables.gpu_record(TARGET), {format_problem(LAYER): entry}))
    tables.forget()
    assert choose(LAYER, TARGET).algorithm is other.algorithm
    made(tmp_path / "kernels.zip", LAYER, monkeypatch=monkeypatch)
    path_of.unlink()
    tables.forget()
    found = choose(LAYER, TARGET)
    assert (found.algorithm, found.config, found.source) == (other.algorithm, other.config, tables.BUNDLE)
    compiles.clear()
    monkeypatch.setenv("LEANCONV_NO_CACHE", "1")
    assert [cache.compiled(each, "sm_90a") for each in launches(LAYER)] and not compiles
    tables.forget()
    monkeypatch.delenv("LEANCONV_BUNDLE")
    assert choose(LAYER, TARGET).algorithm is usual.algorithm


def test_a_model_is_bundled_on_the_command_line(compiles: list[str], run: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "net = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.Conv2d(32, 32, 3, stride=2))\n"
        "example_inputs = torch.randn(4, 16, 20, 20)\n"
    )
    path = tmp_path / "kernels.zip"
    code, out, err = run("precompile", f"{tmp_path / 'net.py'}:net", "--bundle", path)
    assert code == 0, err
    problems = bundle.Bundle.read(path).problems
    ops = [parse_problem(each).op for each in problems]  # type: ignore[union-attr]
    assert ops.count("fprop") == 2 and ops.count("wgrad") == 2 and ops.count("dgrad") >= 1
    assert out.splitlines()[-1].startswith(tuple("0123456789")) and f"which has {len(compiles)} kernels of" in out


def test_drivers_take_code_of_their_major_version(compiles: list[str], tmp_path: Path) -> None:
    found = bundle.Bundle.read(made(tmp_path / "kernels.zip", LAYER))
    with pytest.MonkeyPatch.context() as patch:
        for version, fits in ((13000, True), (13050, True), (14000, True), (12090, False)):
            on_driver(patch, version)
            assert (not found.why_not("sm_90a")) == fits, version
    assert driver.MINIMUM_VERSION == 12000
