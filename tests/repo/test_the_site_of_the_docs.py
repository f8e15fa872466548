"""`make docs` builds a site of docs/ that fetches nothing; what its pages say to write and to run is right."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_api.job import Job
from rlhf_api.kubectl_yaml import read
from rlhf_trainer.commands.cli import app
from tests.each import each_case
from tests.patience import PATIENCE_SECONDS
from tests.repo.tree import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FETCHING = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
NEW = ("start", "tutorials")


class Fetched(HTMLParser):
    """Addresses of other hosts that a browser would fetch with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(FETCHING.get(tag, "")) or ""
        if "//" in address:
            self.found.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a broken link, an unknown anchor or a page without a place in the navigation fails."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        build, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert not done.returncode, done.stderr
    return folder


def test_every_page_is_built_and_fetches_nothing(site: Path) -> None:
    built = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")} - {Path("404")}
    outside = {Path("chart"), Path("CONTRIBUTING"), Path("SECURITY")}
    assert built == {page.relative_to(ROOT / "docs").with_suffix("") for page in PAGES} | outside
    for page in built:
        parser = Fetched()
        parser.feed((site / page.with_suffix(".html")).read_text())
        assert not parser.found, page
    sheets = "".join(sheet.read_text() for sheet in site.rglob("*.css"))
    assert not re.findall(r"@import|url\(['\"]?(?:https?:)?//[^)]*", sheets)


def test_a_site_whose_link_is_broken_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[gone](gone.md)\n")
    own = {"nav": ["index.md"], "extra_css": [], "hooks": []}
    kept = yaml.safe_load((ROOT / "mkdocs.yml").read_text()) | own
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(kept))
    build = [sys.executable, "-m", "mkdocs", "build"]
    done = subprocess.run(build, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode
    assert "gone.md" in done.stderr


def test_links_between_docs_and_pages_outside_lead_on(site: Path) -> None:
    """The chart's page is in helm/, a manifest of examples/ is in no site: there the link's text stays."""
    assert re.search(r'href="jobs.html#pods"', (site / "chart.html").read_text())
    assert re.search(r'href="SECURITY.html"', (site / "security.html").read_text())
    assert "examples/16-best-of-n-sft.yaml is rejection" in (site / "data.html").read_text()


def manifests() -> list[tuple[str, str]]:
    """(page and number, text) of each block of YAML in docs/ that is a whole manifest."""
    blocks = ((page, block) for page in PAGES for block in FENCED.findall(page.read_text()))
    whole = [(page, text) for page, (kind, text) in blocks if kind == "yaml" and "kind: RLHFJob" in text]
    return [(f"{page.relative_to(ROOT)} {number}", text) for number, (page, text) in enumerate(whole)]


@each_case(("place", "text"), manifests(), ids=[place for place, _ in manifests()])
def test_a_manifest_of_a_page_is_valid(place: str, text: str) -> None:
    for document in read(text, place):
        Job.parse(document)


def test_there_are_manifests_in_the_tutorials() -> None:
    assert len([place for place, _ in manifests() if "tutorials" in place]) >= 4


def new_pages() -> list[Path]:
    """The pages whose commands are written for readers to type."""
    pages = [page for page in PAGES if page.parent.name in NEW]
    return [
        *pages,
        *(ROOT / "docs" / name for name in ("index.md", "one-controller.md", "how-to.md", "migration.md")),
        ROOT / "README.md",
    ]


def test_the_readme_is_short_and_narrow() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    assert not [line for line in lines if len(line) > 100]


@each_case("page", new_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_commands_of_a_shell(page: Path) -> None:
    """test_docs_name_what_exists.py holds their names and flags to what there is."""
    lines = page.read_text().replace("\\\n", " ").splitlines()
    programs = ("git ", "make ", "rlhf ", "kubectl ", "helm ", "docker ", "python ", "torchrun ", "R=")
    script = "\n".join(line[4:] for line in lines if line[:4] == "    " and line[4:].startswith(programs))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, capture_output=True)


def test_the_plan_of_the_7b_tutorial_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the mapper says something else now, put what it prints into the page, and read its sentences again."""
    page = (ROOT / "docs/tutorials/seven-b-on-eight-gpus.md").read_text()
    (manifest,) = (text for kind, text in FENCED.findall(page) if kind == "yaml")
    (command,) = re.findall(r"^    rlhf (plan [^\n]*h100-80g)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("qwen-7b-grpo.yaml").write_text(manifest)
    printed = CliRunner().invoke(app, command.split())
    shown = page[page.index("It prints") : page.index("## 3.")].split("\n\n", 1)[1]
    assert without_indent(shown) == without_indent(printed.stdout)
    for gpu, seconds, tokens in re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d,]+) \|$", page, re.MULTILINE):
        told = CliRunner().invoke(app, [*command.split()[:-1], gpu, "--json"])
        predicted = yaml.safe_load(told.stdout)["predicted"]
        assert (f"{predicted['step_seconds']:.1f}", f"{predicted['tokens_per_second']:,.0f}") == (seconds, tokens)


PICTURES = """
plan="rlhf plan qwen-7b-grpo.yaml --gpus-per-node 8 --gpu h100-80g"
pools="{name: train, models: [actor, reference], slotsPerNode: 8}"
pools="$pools, {name: writers, models: [rollout], slotsPerNode: 4}"
apart() {
  $plan --nodes 2 --set "resources={device: GPU}" --set "placement={mode: Manual, pools: [$pools]}" "$@"
}
$plan --nodes 1 --svg docs/images/step-colocated.svg
apart --svg docs/images/step-rollout-pool.svg
apart --set rollout.maxStaleness=1 --svg docs/images/step-ahead.svg
"""
"""Commands that draw the pictures of docs/rollouts.md."""


@pytest.mark.slow
def test_the_pictures_of_steps_are_as_the_page_draws_them(tmp_path: Path) -> None:
    tutorial = (ROOT / "docs/tutorials/seven-b-on-eight-gpus.md").read_text()
    (tmp_path / "qwen-7b-grpo.yaml").write_text(next(text for kind, text in FENCED.findall(tutorial) if kind == "yaml"))
    page = (ROOT / "docs/rollouts.md").read_text()
    (tmp_path / "docs" / "images").mkdir(parents=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = subprocess.run(
        ["bash", "-euc", PICTURES], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, check=True
    )
    drawn = {file.name: file.read_text() for file in (tmp_path / "docs" / "images").iterdir()}
    assert set(drawn) == set(re.findall(r"\(images/(step-[\w-]+\.svg)\)", page))
    for name, picture in drawn.items():
        shown = (ROOT / "docs" / "images" / name).read_text()
        assert words_of(picture) == words_of(shown), "PICTURES draws it"
    seconds = re.findall(r"predicted: (\S+) s \(", printed.stdout.decode())
    assert seconds == re.findall(r"takes (\d\S*) s[,:]", page)[:3]


def words_of(picture: str) -> list[str]:
    """Texts and hover texts of a picture."""
    return [str(each.text) for each in ET.fromstring(picture).iter() if each.tag.endswith(("}text", "}title"))]


def without_indent(text: str) -> list[str]:
    """Lines without the spaces around them."""
    return [line.strip() for line in text.strip().splitlines()]
