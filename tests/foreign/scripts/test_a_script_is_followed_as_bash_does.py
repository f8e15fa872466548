"""Scripts of other people: the shapes that their options have in bash, each small and in our own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_importers.bash import Script
from rlhf_importers.command import convert
from rlhf_importers.scalars import UNKNOWN
from rlhf_importers.shell import call
from tests.each import each_case

ARRAYS = """#!/usr/bin/env bash
set -xeuo pipefail
BASE=${BASE_OF_NO_ENVIRONMENT:-Qwen/Qwen3-8B}
group=${GROUP_OF_NO_ENVIRONMENT:-5}
ROWS=(
    algorithm.adv_estimator=grpo          # groups
    # algorithm.adv_estimator=gae
    data.train_files="['$HOME/sums/train.parquet', '$HOME/words/train.parquet']"
    data.train_batch_size=512
    data.max_prompt_length=$((1024))
    data.max_response_length=$((1024 * 2))
)
POLICY=(
    actor_rollout_ref.model.path="$BASE"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.rollout.n=${group}
)
MORE=()
MORE+=(trainer.total_epochs=15)
python3 -m verl.trainer.main_ppo "${ROWS[@]}" "${POLICY[@]}" "${MORE[@]}" "$@"
"""

WORDS = {
    "a default": ("run --a=${NOT_SET_ANYWHERE:-7}", ["--a=7"]),
    "a default that is a path with a variable": ('B=/d; run ${NOT_SET:-"${B}/x y"}/z', ["/d/x y/z"]),
    "a default of a default": ("run ${NOT_SET:-${NOR_THIS:-3}}", ["3"]),
    "a default that is a sum": ("a=2; b=3; run ${NOT_SET:-$((a + b))}", ["5"]),
    "a default that is a negative number": ("run ${NOT_SET:--1}", ["-1"]),
    "an empty default": ("run a ${NOT_SET:-} b", ["a", "b"]),
    "a default that is kept": (": ${KEPT:=4}; run $KEPT", ["4"]),
    "another value if one is set": ("A=1; run ${A:+x} ${NOT_SET:+y}", ["x"]),
    "a name next to a variable": ("V=a; run ${V}_y $V-z", ["a_y", "a-z"]),
    "quotes within a word": (
        """run a.b='["x","y"]' c.d="it's" e.f=\\"g\\" """,
        ['a.b=["x","y"]', "c.d=it's", 'e.f="g"'],
    ),
    "single quotes within double ones": ("""H=/d; run "['$H/a', '$H/b']" """, ["['/d/a', '/d/b']"]),
    "brackets without quotes": ("run logger=['console','wandb']", ["logger=[console,wandb]"]),
    "an array of one word and of several": (
        'A=(x "y z"); run "${A[@]}" "${A[*]}" "${A[1]}" $#',
        ["x", "y z", "x y z", "y z", "0"],
    ),
    "an array that is taken back": ('A=(x); unset A; run "${A[@]}" ${A:-none}', ["none"]),
    "arguments that the script sets": ('set -e; set -- a "b c"; run "$@" $# $1', ["a", "b c", "2", "a"]),
    "escapes": (r"A=(x y); IFS=$'\n'; run $'a\tb' $'it\'s' " + '"${A[*]}"', ["a\tb", "it's", "x\ny"]),
    "an empty array": ('A=(); run a "${A[@]}" b', ["a", "b"]),
    "an array that grows": ('A=(a); A+=(b c); run "${A[@]}"', ["a", "b", "c"]),
    "a text that grows": ('A="--a 1"; A+=" --b 2"; run $A', ["--a", "1", "--b", "2"]),
    "arguments that nobody gave": ('run a "$@" $*', ["a"]),
    "sums with brackets": ("a=2; b=3; run $(((a + b) * 10 / 4)) $((b % 2 == 1))", ["12", "1"]),
    "a sum of a default": ("run $((${NOT_SET:-4} * 2))", ["8"]),
    "a comment within a line": ("run a `# no option` b", ["a", "b"]),
    "a line of Windows": ("run a \\\r\n  b\r\n", ["a", "b"]),
    "the folder of the script": ('D="$(dirname "$0")"; W=$(cd "$D/.." && pwd); run $W/x $D', ["x/x", "x/y"]),
    "a function that calls itself": ('f() { A+=(x); f; }; A=(); f; run "${A[@]}"', ["x"]),
    "a flag that is a program": ("U=true; if $U && ! false; then A=1; else A=2; fi; run $A", ["1"]),
    "a choice by what nobody sets": ('A=0; if [ -z "$NOT_SET" ] && [ -n "$A" ]; then A=1; fi; run $A', ["1"]),
    "the folder of the script in full": (
        'D=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &> /dev/null && pwd -P); run $D',
        ["x/y"],
    ),
    "what a function adds": ('f() { A+=("$1=$2"); }; A=(); f a 1; f b 2; run "${A[@]}"', ["a=1", "b=2"]),
    "a variable over two lines": ('read -r -d "" X <<EOF\n  a \\\n --b 1\nEOF\nrun $X', ["a", "--b", "1"]),
    "a choice by the value of a variable": (
        'D=gpu; case "${D}" in npu) A=1 ;; gpu|cpu) A=2 ;; *) A=3 ;; esac; run $A',
        ["2"],
    ),
    "a choice by a test": ('A=1; if [ "${U:-1}" != 0 ] && [[ "$A" == "1" ]]; then A=2; else A=3; fi; run $A', ["2"]),
    "a choice of three": (
        'A=x; if [ $A = y ]; then B=1; elif [[ -n "$A" && $A == x* ]]; then B=2; else B=3; fi; run $B',
        ["2"],
    ),
    "a choice by a number": ('A=2; [ "$A" -gt 1 ] && B=big || B=small; run $B', ["big"]),
    "a choice by a sum": ("A=2; if ((A % 2 != 0)); then B=odd; else B=even; fi; run $B", ["even"]),
    "an argument that nobody gave": ('if [[ ${1} != "slurm" ]]; then run a; fi', ["a"]),
    "what redirects": ("run a > log 2>&1 | tee b", ["a"]),
    "what is set for one command": ("A=1 B=2 run a", ["a"]),
    "a command in a variable": ('L=(uv run); C="a b"; "${L[@]}" $C', ["a", "b"]),
}
"""Script -> the words after `run` of the one command that has it."""


def words_of(text: str) -> list[str]:
    script = Script("x/y/z.sh")
    script.read(text)
    (words,) = (each for each in script.commands if "run" in each)
    return words[words.index("run") + 1 :]


@each_case("case", WORDS)
def test_the_words_are_those_of_bash(case: str) -> None:
    text, expected = WORDS[case]
    assert words_of(text) == expected


def test_a_secret_of_the_environment_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    draft = convert(f"{ARRAYS} trainer.experiment_name=$WANDB_API_KEY", "verl", source="run.sh")
    assert "s3cr3t" not in str(draft.document())


def test_options_in_arrays_become_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/me")
    draft = convert(ARRAYS, "verl", source="run.sh")
    Job.parse(draft.document())
    assert draft.algorithm == "GRPO"
    assert draft.spec["training"] == {"promptBatchSize": 512, "miniBatchSize": 1280, "totalEpochs": 15}
    assert draft.get("rollout.samplesPerPrompt") == 5
    assert draft.get("models.actor.optimizer.learningRate") == 1e-6
    assert (draft.get("data.maxPromptTokens"), draft.get("data.maxResponseTokens")) == (1024, 2048)
    uris = [each["uri"] for each in draft.get("data.train.mix")]
    assert uris == ["file:///srv/me/sums/train.parquet", "file:///srv/me/words/train.parquet"]
    assert not draft.unknown


@each_case(
    "value",
    [
        "$NOT_SET_ANYWHERE/model",
        "${NOT_SET_ANYWHERE}/m",
        "$1",
        "$(some_program)/m",
        "${HOME/a/b}/m",
        "$((NOT_SET * 2))",
    ],
)
def test_a_value_that_only_a_run_knows_is_no_path(value: str) -> None:
    text = f'python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path="{value}"'
    draft = convert(text, "verl", source="run.sh")
    assert draft.get("models.actor.uri") is None
    sentence = draft.lost["actor_rollout_ref.model.path"]
    assert sentence == f"only a run of the script knows its value, {value}"
    assert UNKNOWN not in str(draft.document())


def test_what_is_guessed_is_said() -> None:
    choice = "if [ -f /a/file ]; then A=1; else A=2; fi"
    text = f"{choice}\nfor ((i = 0; i < 2; i++)); do sleep 1; done\npython -m a.main_ppo x.y=$A"
    words, notes = call(text, "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", "x.y=2"]
    assert [note.split(":")[0] for note in notes] == ["line 1", "line 2"]
    assert "only a run of the script knows whether this holds; here it does not" in notes[0]
    assert "a loop is not followed" in notes[1]


@pytest.mark.parametrize("word", ["$OPTIONS_THAT_NOBODY_SETS", "$(some_program)", "--config-name=big"])
def test_options_that_are_not_in_the_script_are_told(word: str) -> None:
    draft = convert(f"python -m verl.trainer.main_ppo data.seed=1 {word}", "verl", source="run.sh")
    assert f"{word}: is not read" in draft.checks


def test_options_below_a_comment_are_told() -> None:
    text = "python -m a.main_ppo x.y=1 \\\n    # x.z=2 \\\n    x.w=3"
    words, notes = call(text, "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", "x.y=1"]
    assert any(note.startswith("x.w=3 is no part of a command") for note in notes)


def test_the_last_of_several_trainings_is_read() -> None:
    words, notes = call("python -m a.main_ppo x=1\npython -m a.main_ppo x=2", "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", "x=2"]
    assert notes == ["the script starts 2 trainings; the last one is read"]


def test_a_command_within_quotes_is_read() -> None:
    text = """srun bash -c "pip install x \\
        && python3 -m a.main_ppo x.y=1 \\
           x.z='2' " """
    assert call(text, "run.sh", r"[\w.]*main_ppo")[0] == ["a.main_ppo", "x.y=1", "x.z=2"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a.b=1\nrun 'a", r"run.sh: line \d: cannot be read as bash: "),
        ("a.b=1\nif x; then y", r"run.sh: line \d: cannot be read as bash: "),
    ],
)
def test_a_script_that_cannot_be_followed_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        convert(text, "verl", source="run.sh")


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    script = Script("run.sh")
    script.read(f"touch {made}; A=$(touch {made}); eval 'touch {made}'; `touch {made}`; [ $(touch {made}) ]")
    assert not made.exists()


def test_a_name_in_a_quoted_value_is_no_call() -> None:
    words, _ = call('python -m a.main_ppo x.note="see main_ppo (it doesn\'t)"', "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", "x.note=see main_ppo (it doesn't)"]


def test_a_case_of_what_only_a_run_knows_is_told() -> None:
    text = 'case "$1" in ppo) A=gae;; *) A=grpo;; esac\npython -m a.main_ppo x=$A'
    words, notes = call(text, "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", "x=grpo"]
    assert any("only a run of the script knows which case holds" in note for note in notes)


@each_case("word", ['"$@"', "$@", "$*", "${@}"])
def test_arguments_of_the_script_are_told(word: str) -> None:
    words, notes = call(f"python -m a.main_ppo x=1 {word}", "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", "x=1"]
    assert notes == ["the script's own arguments are not known"]


def test_arguments_that_the_script_sets_have_no_note() -> None:
    text = 'set -- x=1\nf() { python -m a.main_ppo "$@"; }\nf "$@"'
    assert call(text, "run.sh", r"[\w.]*main_ppo") == (["a.main_ppo", "x=1"], [])


def test_what_eval_runs_is_read() -> None:
    words, _ = call("eval 'python -m a.main_ppo x.y=1'", "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", "x.y=1"]
