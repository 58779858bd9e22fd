import shutil
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel built from a copy of the tree, unpacked by pip outside of it."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".git", "logs", "build", "*.egg-info", "__pycache__", ".venv")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignore)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", source, "--no-deps", "--no-build-isolation", "-w", folder], check=True)
    [wheel] = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


def test_the_wheel_has_every_module_and_asset(installed):
    def files(root):
        package = root / "ddpo_pytorch"
        return {str(p.relative_to(root)) for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc"}

    assert files(installed) == files(ROOT)


def test_every_module_imports_outside_the_tree(installed, tmp_path):
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "ddpo_pytorch").rglob("*.py")
    ]
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(installed)!r})\n"
        f"for name in {modules}: module = importlib.import_module(name); "
        f"assert module.__file__.startswith({str(installed)!r}), module.__file__\n"
        "from ddpo_pytorch import prompts; print(prompts.simple_animals())"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
