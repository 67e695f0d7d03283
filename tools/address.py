"""Where the book is published: known from the environment of GitHub Actions, or not at all.

Nothing else in the repository knows its own address. `address()` is None on a machine that
does not publish, and on servers other than GitHub, whose notebooks Colab can't open; what
needs an address is then left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

SERVER = "https://github.com"
NOTEBOOKS = "colab"  # the branch of the notebooks that editions/colab.py writes


@dataclass(frozen=True)
class Address:
    """The public addresses of a repository at one commit."""

    owner: str
    name: str
    commit: str
    branch: str  # that the commit was pushed to; empty for a tag

    @property
    def repository(self) -> str:
        return f"{SERVER}/{self.owner}/{self.name}"

    @property
    def site(self) -> str:
        """GitHub Pages, with a slash at the end."""
        host = f"{self.owner.lower()}.github.io"
        return f"https://{host}/" + (f"{self.name}/" if self.name.lower() != host else "")

    @property
    def archive(self) -> str:
        """The source at this commit, which pip can install where there is no git."""
        return f"{self.repository}/archive/{self.commit}.zip"

    def edit(self, path: str) -> str | None:
        """The editor for a file of the repository; only a branch can be edited."""
        return f"{self.repository}/edit/{self.branch}/{path}" if self.branch else None

    def colab(self, chapter: str) -> str:
        """The notebook of a chapter, opened in Colab."""
        notebook = f"{self.owner}/{self.name}/blob/{NOTEBOOKS}/{chapter}.ipynb"
        return f"https://colab.research.google.com/github/{notebook}"

    @property
    def releases(self) -> str:
        """The newest release; GitHub shows an empty list while there is none."""
        return f"{self.repository}/releases/latest"


def address(environ: Mapping[str, str] = os.environ) -> Address | None:
    """The address that the environment gives, or None."""
    repository = environ.get("GITHUB_REPOSITORY", "")
    if not repository or environ.get("GITHUB_SERVER_URL", SERVER) != SERVER:
        return None
    commit = environ.get("GITHUB_SHA", "")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+ [0-9a-f]{40}", f"{repository} {commit}"):
        raise ValueError(
            "GITHUB_REPOSITORY and GITHUB_SHA should be owner/name and a whole commit, "
            f"not {repository!r} and {commit!r}"
        )
    owner, _, name = repository.partition("/")
    on_branch = environ.get("GITHUB_REF_TYPE") == "branch"
    branch = environ.get("GITHUB_REF_NAME", "") if on_branch else ""
    return Address(owner, name, commit, branch)
