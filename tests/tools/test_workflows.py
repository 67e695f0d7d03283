"""The workflows of GitHub Actions: well formed, pinned, and without needless rights."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from tiny_book import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in WORKFLOWS}
JOBS = {
    f"{file} {name}": job
    for file, text in TEXTS.items()
    for name, job in yaml.safe_load(text)["jobs"].items()
}


def zizmor(path: Path) -> subprocess.CompletedProcess:
    """zizmor, a linter for security, without the network."""
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    program = shutil.which("zizmor", path=folders)
    assert program, "zizmor is missing; requirements.txt brings it"
    command = [program, "--offline", "--persona", "pedantic", "--no-progress", str(path)]
    return subprocess.run(command, capture_output=True, encoding="utf-8")


def schema(name: str, *files: Path) -> subprocess.CompletedProcess:
    """Comparison with one of the schemas that check-jsonschema carries."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", name]
    return subprocess.run([*command, *files], capture_output=True, encoding="utf-8")


def test_workflows_are_as_github_expects():
    done = schema("vendor.github-workflows", *WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr
    done = schema("vendor.dependabot", ROOT / ".github" / "dependabot.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_are_safe():
    done = zizmor(ROOT / ".github")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (r"deploy-pages@\w+", "deploy-pages@v5", "unpinned-uses"),
        (r"run: \.ci/run", "run: echo ${{ github.head_ref }}", "template-injection"),
        (r"persist-credentials: false", "clean: true", "artipacked"),
        (r"(?m)^permissions: \{\}", "permissions: write-all", "excessive-permissions"),
    ],
)
def test_a_fault_is_found(tmp_path, old, new, rule):
    """The linter looks at what matters here, and finds it."""
    text, count = re.subn(old, new, TEXTS["site.yml"])
    assert count
    path = tmp_path / ".github" / "workflows" / "site.yml"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    done = zizmor(path)
    assert done.returncode and rule in done.stdout, done.stdout + done.stderr


def test_a_misspelled_key_is_found(tmp_path):
    path = tmp_path / "site.yml"
    path.write_text(TEXTS["site.yml"].replace("runs-on", "run-on"), encoding="utf-8")
    assert schema("vendor.github-workflows", path).returncode


def test_actions_are_pinned_to_one_commit_with_its_version():
    used: dict[str, set[str]] = {}
    for file, text in TEXTS.items():
        for line in re.findall(r"uses: ([^$].*)", text):  # not $/, which is here
            pinned = re.fullmatch(r"([\w/-]+)@([0-9a-f]{40}) # v\d+\.\d+\.\d+", line)
            assert pinned, f"{file}: {line}: expected owner/name@commit # vX.Y.Z"
            used.setdefault(pinned[1], set()).add(line)
    assert used and all(len(lines) == 1 for lines in used.values()), used


def test_jobs_end_and_only_those_that_publish_may_write():
    own = [job for job in JOBS.values() if "uses" not in job]
    assert own and all("timeout-minutes" in job for job in own)
    rights = {name: job["permissions"] for name, job in JOBS.items()}
    more = {name: given for name, given in rights.items() if given != {"contents": "read"}}
    assert more == {
        "site.yml pages": {"pages": "write", "id-token": "write"},
        "site.yml colab": {"contents": "write"},
        "release.yml pypi": {"id-token": "write"},
        "release.yml github": {"contents": "write"},
    }
    for name in more:  # what may write runs nothing of the repository
        assert "checkout" not in str(JOBS[name]["steps"]), name
