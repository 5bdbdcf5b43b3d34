"""What is shipped: three packages, two commands, an import that is quick and light."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from what git tracks, outside the source tree."""
    source = tmp_path_factory.mktemp("source")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in files.split("\0"):
        if name and (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return next(out.glob("nearflash-*.whl"))


def run(*command: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "NEARFLASH_", "AWS_"))}
    if path:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_dir_lists_what_is_loaded_when_it_is_used() -> None:
    import cachefs
    import ckptstore
    import loader

    for package in (cachefs, ckptstore, loader):
        assert set(package.__all__) <= set(dir(package))


def test_the_wheel_ships_exactly_the_three_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"cachefs", "loader", "ckptstore"}
    assert {"cachefs/py.typed", "loader/py.typed", "ckptstore/py.typed"} <= set(names)
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_the_wheel_works_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)
    for package in ("cachefs", "ckptstore"):
        script = f"import {package}.cli as c, sys; sys.argv = ['{package}', '--help']; print(c.__file__); c.main()"
        done = run(sys.executable, "-c", script, cwd=tmp_path, path=site)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(str(site))
        assert "Usage" in done.stdout
    done = run(sys.executable, "-c", "import loader; print(loader.__file__)", cwd=tmp_path, path=site)
    assert done.stdout.startswith(str(site)), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_installs_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=700, cwd=tmp_path)
    for command in ("cachefs", "ckptstore"):
        done = run(str(python.with_name(command)), "--help", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = run(str(python), "-c", "import cachefs, loader, ckptstore; print(loader.ShardDataset)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_import_cachefs_is_quick_and_light(tmp_path: Path) -> None:
    script = (
        "import sys, time; t = time.perf_counter(); import cachefs; d = time.perf_counter() - t; "
        "heavy = {'torch', 'pyarrow', 'obstore', 'fsspec', 'numpy', 'asyncio'} & set(sys.modules); print(d, *heavy)"
    )
    seconds = []
    for _ in range(5):
        done = run(sys.executable, "-c", script, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        figure, *heavy = done.stdout.split()
        assert heavy == []
        seconds.append(float(figure))
    assert min(seconds) < 0.05
