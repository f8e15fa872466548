"""Statements that change a variable in bash are followed, or make the variable unknown, beside the real bash."""

from __future__ import annotations

import subprocess

import pytest

from rlhf_importers.bash import Script
from rlhf_importers.scalars import UNKNOWN
from rlhf_importers.shell import call
from tests.each import each_case

FOLLOWED = """
x=7; run $((x==7)) $((x!=3)) $((x<=9))
x=1; (( x > 0 )) && run $x
x=old; echo new | read x; run $x
A={a,b}; run $A '{a,b}' "{c,d}" {e} ${A:-x} \\{a,b\\}
run '$((1 + 2))' "$((1 + 2))"
f() { local A=new; }; A=old; f; run $A
f() { local A; A=new; }; A=old; f; run $A
f() { declare -g A=new; }; A=old; f; run $A
A=(a b); A=c; run ${A[@]}
A=(a b); A+=c; run ${A[@]}
x=old; (x=new); run $x
x=old; (x=new; run $x)
x=old; x=new | cat; run $x
x=old; x=new & run $x
x=old; { x=new; }; run $x
f() ( x=new ); x=old; f; run $x
f() { x=new; return; x=newer; }; x=old; f; run $x
f() { if true; then return 0; fi; x=new; }; x=old; f; run $x
f() { x=a; (return); x=b; }; f; run $x
f() { return 1; }; x=1; f || x=2; run $x
f() { case $1 in a) return;; esac; x=new; }; x=old; f a; run $x
x=old; unset x; run ${x-gone}
x=old; unset -v x; run ${x-gone}
f() { x=new; }; x=old; unset -f f; run $x
A=old; while [[ $# -gt 0 ]]; do A=$1; shift; done; run $A
set -- a b; shift; run $1 $# "$@"
set -- a b; set -- c; run ${2-none} $1
f() { run ${1-none}; }; set -- a; f
set -- a; run x${2}y ${3:-z}
f() { run $A; }; A=old; A=new f
A='a  b'; B=$A; run "$B"
f() { local A=$A; A+=new; run $A; }; A=old; f
run ${y:-a b} "${y:-a b}" ${y:-"a b"}
""".strip().splitlines()
UNTOLD = """
x=1; (( x = 2 )); run $x
x=1; let x=2; run $x
x=1; ((x++)); run $x
x=1; y=$((x += 4)); run $x $y
x=5; (( x -= 2, y = x )); run $x $y
x=old; read x <<< 'new text'; run $x
x=old; IFS=, read -r x y <<< a,b; run $x $y
x=old; read x < <(echo new); run $x
run x{a,b}y {1..3}
A=({a,b}); run ${A[@]}
A=x; run ${A}{1,2}
run x={"a","b"}
f() { local -n r=A; r=new; }; A=old; f; run $A
f() { local -n r=$1; r+=(b); }; A=(a); f A; run ${A[@]}
declare -n r=A; A=old; r=new; run $A
A=(x y); A=([0]=z); run ${A[@]}
A=(x y); A[1]=z; run ${A[@]}
x=old; printf -v x '%s' new; run $x
f() { printf -v "$1" new; }; x=old; f x; run $x
A=(old); mapfile -t A < <(echo new); run ${A[@]}
A=(old); readarray -t A <<< new; run ${A:-d} ${A:+d}
A=(old); mapfile -t A <<< new; run ${A[0]} ${A[1]-none}
A=(a b); unset 'A[0]'; run ${A[@]}
declare -A M=([k]=v); M[k]=w; run ${M[k]}
declare -i n; n=2+3; run $n
declare -u x; x=abc; run $x
x=old; declare "x=new"; run $x
x=old; y=x; export $y=new; run $x
for x in a b; do A=$x; done; run $A
f() { A=new; }; A=old; for i in 1; do f; done; run $A
A=old; i=0; while ((i < 2)); do ((i++)); A=$i; done; run $A $i
set -- -a; x=old; getopts a x; run $x
cd /; run $PWD
set -- a b; for i in 1; do shift; done; run $1
x=010; run $((x + 1))
x=-7; run $((x / 2)) $((x % 2))
x=old; y=$(x=new; echo $x); run $x $y
x=old; eval x=new; run $x
x=$(echo a >&2; echo b); run $x
A=(x y); B="[$(IFS=,; echo "${A[*]}")]"; run $B "${A[*]}"
f() { echo "--$1 2"; }; run $(f a)
D=$(some_probe 2>/dev/null && echo npu || echo gpu); run $D
set -- a b; for i in 1; do shift; done; run $#
set -- a b; for i in 1; do shift; done; run ${2:-c}
D=$(pwd | tr / x); run $D
""".strip().splitlines()
PRELUDE = 'exec 3>&1 > /dev/null 2>&1; run() { printf "%s\\0" "$@" >&3; }\n'


def words_of(text: str) -> list[str]:
    script = Script("run.sh")
    script.read(text)
    (words,) = (each for each in script.commands if each[0] == "run")
    return words[1:]


def words_of_bash(text: str) -> list[str]:
    result = subprocess.run(["bash", "-c", PRELUDE + text], capture_output=True, text=True, check=False)
    return result.stdout.split("\0")[:-1]


@each_case("text", FOLLOWED)
def test_what_is_followed_is_as_in_bash(text: str) -> None:
    assert words_of(text) == words_of_bash(text)


@each_case("text", UNTOLD)
def test_what_is_not_followed_is_unknown(text: str) -> None:
    found, expected = words_of(text), words_of_bash(text)
    assert any(UNKNOWN in word for word in found)
    assert all(UNKNOWN in word or word in expected for word in found)


@each_case("change", ["((x = 2))", "read x <<< 2", "printf -v x 2", "mapfile x", "x=([0]=2)", "x[0]=2"])
def test_a_note_names_the_line_of_the_change(change: str) -> None:
    words, notes = call(f"x=1\n{change}\npython -m a.main_ppo a.b=$x", "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", f"a.b={UNKNOWN}x of line 2{UNKNOWN}"]
    assert notes == [f"line 2: {change}: only a run of the script knows x"]


def test_words_of_an_unknown_value_are_no_options() -> None:
    words, _ = call("x=$(some_program --a=1 b.c=2)\npython -m a.main_ppo $x", "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", f"{UNKNOWN}$(some_program --a=1 b.c=2){UNKNOWN}"]


def test_a_call_in_a_branch_that_is_not_taken_is_told() -> None:
    text = 'if [ "$RANK_OF_NO_RUN" == 0 ]; then\n  python -m a.main_ppo x.y=1\nfi'
    words, notes = call(text, "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", "x.y=1"]
    assert notes == ["line 2: python -m a.main_ppo x.y=1: this is followed, though its condition does not hold"]


def test_a_file_that_is_sourced_is_told() -> None:
    _, notes = call("source my.env\npython -m a.main_ppo", "run.sh", r"[\w.]*main_ppo")
    assert notes == ["line 1: source my.env: the file is not read"]


@pytest.mark.parametrize("start", ["eval", "bash -c"])
def test_an_unknown_value_within_quotes_stays_one(start: str) -> None:
    words, _ = call(f'read x\n{start} "python -m a.main_ppo a.b=$x"', "run.sh", r"[\w.]*main_ppo")
    assert words == ["a.main_ppo", f"a.b={UNKNOWN}$(x of line 1){UNKNOWN}"]
