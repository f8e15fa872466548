"""The page of a finished run: what was learned, where the time went, what the model says, with what it ran."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.report.conftest import PPO, page_of, ppo_record, run_job, sample

Chain = Callable[[list[dict[str, Any]]], Path]


def test_every_job_has_a_section_in_the_order_of_the_chain(chain: Chain) -> None:
    page = page_of(chain([sample(1), sample(2)]))
    assert [name for name in page.sections if name] == ["helpful-sft", "helpful-rm", "helpful-ppo", "environment"]
    assert "loss/sft" in page.sections["helpful-sft"]
    assert "accuracy/pairs" in page.sections["helpful-rm"]
    assert all(name in page.sections["helpful-ppo"] for name in ("reward/mean", "kl/reference", "loss/policy"))
    assert "learningRate: 0.0002" in page.sections["helpful-ppo"], "the settings"
    assert "PPO on 2 CPU slots" in page.sections["helpful-ppo"], "the events"
    assert "2.99.0" in page.sections["environment"]
    assert page.row("helpful-ppo", "PPO")[2:5] == ["Succeeded", "25 of 25", "2 s"]


def test_before_and_after_have_the_interval_of_the_change(chain: Chain) -> None:
    gains = [0, 1, 2, 5]
    page = page_of(chain([sample(gain) for gain in gains]))
    margin = 1.96 * statistics.stdev(gains) / 2
    assert page.row("helpful-sft", "loss")[2:4] == ["", "0.4"]
    assert page.row("helpful-rm", "pair_accuracy")[2:4] == ["", "0.938"]
    assert page.row("helpful-ppo", "reward")[2:5] == ["0.5", "1.5", "+1 ± 0"]
    assert page.row("", "rule")[2:5] == ["0", "2", f"+2 ± {margin:.2g}"]
    assert page.row("", "win rate")[2:4] == ["0.47", "0.875"]


@pytest.mark.parametrize(
    ("gains", "colour"), [([0, 0, 0, 1], "quiet"), ([2, 2, 3, 3], "up"), ([-2, -2, -3, -3], "down")]
)
def test_a_change_has_a_colour_only_if_it_is_surely_no_chance(chain: Chain, gains: list[int], colour: str) -> None:
    folder = chain([sample(gain) for gain in gains])
    page_of(folder)
    html = (folder / "report.html").read_text()
    row = html[html.index("<td>rule</td>") :]
    assert row[: row.index("</tr>")].count(f'class="n {colour}"') == 1


def test_a_changing_metric_is_a_plot_a_constant_a_number(chain: Chain) -> None:
    folder = chain([sample(1)])
    page_of(folder)
    html = (folder / "report.html").read_text()
    ppo = html[html.index('id="helpful-ppo"') :]
    captions = [part[: part.index("</b>")] for part in ppo.split("<figcaption><b>")[1:]]
    learning = ["reward/mean", "kl/reference", "loss/policy", "reward", "rule"]
    assert captions == [*learning, "seconds a step, by phase"]
    assert "bytes/controller <b>0</b>" in ppo


def test_costs_multiplier_and_margin_are_drawn(tmp_path: Path) -> None:
    measured = ("margin/pairs", "lagrange/multiplier", "cost/mean", "entropy")
    run_job(tmp_path, PPO, [{**ppo_record(step), **dict.fromkeys(measured, step / 2)} for step in (1, 2, 3)])
    page_of(tmp_path)
    html = (tmp_path / "report.html").read_text()
    learning = html[html.index("<h3>Did it learn") : html.index("<h3>Is it healthy")]
    captions = [part[: part.index("</b>")] for part in learning.split("<figcaption><b>")[1:]]
    drawn = ["reward/mean", "cost/mean", "lagrange/multiplier", "kl/reference", "margin/pairs", "loss/policy"]
    assert captions == drawn
    assert "weighs the cost against the reward" in learning


def test_the_phases_of_a_step_are_shares_of_its_time(chain: Chain) -> None:
    page = page_of(chain([sample(1)]))
    assert [row for row in page.cells if row[0] in ("generation", "update", "controller")][-3:] == [
        ["update", "1 s", "50.0 %"],
        ["generation", "500 ms", "25.0 %"],
        ["controller", "500 ms", "25.0 %"],
    ]
    assert "add up to more" not in page.sections["helpful-ppo"]


def test_phases_at_the_same_time_are_no_parts_of_the_step(tmp_path: Path) -> None:
    run_job(tmp_path, PPO, [{**ppo_record(1), "time/scoring": 1.0}])
    assert "add up to more than the step" in page_of(tmp_path).sections["helpful-ppo"]


def test_the_best_the_middle_and_the_worst_samples_come_first(chain: Chain) -> None:
    text = page_of(chain([sample(number) for number in range(100)])).sections["helpful-ppo"]
    first = text[text.index("Gained most") : text.index("91 more")]
    assert [number for number in range(100) if f"How? {number}\n" in first] == [0, 1, 2, 48, 49, 50, 97, 98, 99]
    assert all(f"How? {number}\n" in text for number in range(100))


def test_thousands_of_samples_leave_a_small_page(chain: Chain) -> None:
    folder = chain([sample(number, after="words" * 2000) for number in range(4000)])
    text = page_of(folder).sections["helpful-ppo"]
    assert "250 more; another 3741 are only in samples.jsonl" in text
    assert "(8,000 more characters)" in text
    assert (folder / "report.html").stat().st_size < 3_000_000


def test_a_thousand_steps_are_drawn_with_few_points(tmp_path: Path) -> None:
    sizes = []
    for steps in (250, 1000):
        run_job(tmp_path / str(steps), PPO, map(ppo_record, range(1, steps + 1)))
        page_of(tmp_path / str(steps))
        sizes.append((tmp_path / str(steps) / "report.html").stat().st_size)
    assert sizes[1] < 1.1 * sizes[0]


def test_the_page_fetches_nothing_and_may_run_nothing(chain: Chain) -> None:
    page = page_of(chain([sample(1)]))
    links = [value for _, attributes in page.elements for name, value in attributes.items() if name in ("href", "src")]
    assert links
    assert all(link and link.startswith("#") for link in links)
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object"}
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    style = (Path(sys.modules["rlhf_trainer.report"].__path__[0]) / "templates" / "style.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_what_a_model_or_a_user_wrote_is_text_and_never_markup(chain: Chain) -> None:
    nasty = '<script>alert(1)</script><img src=x onerror=y> & "quoted" 日本語 🚀 \u202e \u2028 \x85 \x1b[31m'
    page = page_of(chain([sample(1, prompt=nasty, before=nasty, after=nasty), sample(2)]))
    assert not {tag for tag, _ in page.elements} & {"script", "img"}
    text = page.sections["helpful-ppo"]
    assert text.count('<script>alert(1)</script><img src=x onerror=y> & "quoted" 日本語 🚀') == 3
    assert "\N{SYMBOL FOR ESCAPE}[31m" in text
    assert "cannot be read" not in text


def test_half_a_surrogate_pair_in_a_sample_does_no_harm(chain: Chain) -> None:
    folder = chain([sample(1)])
    with (folder / "helpful-ppo" / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample(2, after="half \ud800 a pair")) + "\n")
    assert "half ? a pair" in page_of(folder).sections["helpful-ppo"]


def test_the_report_needs_neither_torch_nor_ray_nor_vllm(chain: Chain) -> None:
    program = (
        "import sys; from pathlib import Path; from rlhf_trainer.report.page import write_report;"
        "write_report(Path(sys.argv[1])); sys.exit(', '.join({'torch', 'ray', 'vllm'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", program, str(chain([sample(1)]))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
