"""`rlhf ui` in a real Chromium: it searches, sorts, opens a run, and a curve grows while the run is written."""

import asyncio
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from rlhf_trainer.commands.ui import application
from rlhf_trainer.run_folder.lock import only_run_in
from tests.trainer.report.browser import PROGRAM, Tab, chromium, tab_of
from tests.trainer.report.conftest import PPO, SFT, finish, ppo_record, run_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="needs a browser: apt-get install chromium"),
]
NAMES = "[...document.querySelectorAll('.runs .run a')].map((one) => one.textContent)"
POINTS = "document.querySelector('figure svg').querySelectorAll('use').length"


async def look(tab: Tab, url: str, root: Path) -> None:
    await tab.open(url)
    assert await tab.until(f"{NAMES}.length === 3 && {NAMES}")
    await tab.value("document.querySelector('[name=text]').focus()")
    await tab.type("beta")
    assert await tab.until(f"{NAMES}.length === 1 && {NAMES}") == ["beta"], "rows follow what is typed"
    assert await tab.value("location.search.includes('text=beta') && document.activeElement.name === 'text'")
    await tab.open(url)
    await tab.until(f"{NAMES}.length === 3")
    await tab.value("[...document.querySelectorAll('th a')].find((one) => one.textContent.startsWith('step')).click()")
    assert await tab.until(f"location.search.includes('order=-step') && {NAMES}") == ["alpha", "beta", "gamma"]
    await tab.value("[...document.querySelectorAll('.runs input')].slice(0, 2).forEach((one) => one.click())")
    await tab.until("new URLSearchParams(location.search).getAll('run').join() === 'alpha,beta'")
    await tab.value("[...document.querySelectorAll('#filters button')].at(-1).click()")
    await tab.until("document.title.endsWith('RLHF runs compared') && !!document.querySelector('figure svg')")
    await tab.open(url)
    await tab.until(f"{NAMES}.length === 3")
    await tab.value("[...document.querySelectorAll('.runs a')].find((one) => one.textContent === 'beta').click()")
    before = await tab.until(f"document.querySelector('figure svg') && {POINTS}")
    with only_run_in(root / "beta"):
        folder = run_job(root / "beta", PPO, map(ppo_record, range(1, 4)))
        for step in (4, 5, 6):
            folder.record(ppo_record(step), total_steps=25, stage="PPO")
            await tab.until(f"document.querySelector('.jobs').textContent.includes('{step} of 25')")
        assert await tab.value(POINTS) > before, "the curve has grown"
        assert await tab.value("document.querySelector('.pill').textContent.includes('Running')")
    assert tab.errors == []


def test_a_curve_grows_before_the_readers_eyes(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    finish(root / "alpha", run_job(root / "alpha", PPO, map(ppo_record, range(1, 26))), reward_before=1, reward_after=2)
    run_job(root / "beta", PPO, map(ppo_record, range(1, 4)))
    run_job(root / "gamma", SFT, [])

    async def visit(port: int) -> None:
        async with TestServer(application(root)) as server, tab_of(port) as tab:
            await look(tab, f"http://127.0.0.1:{server.port}/", root)

    with chromium(tmp_path / "profile") as port:
        asyncio.run(visit(port))
