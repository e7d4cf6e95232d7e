"""Which engine a command goes by where none is named, and what it says of one that refuses."""

import pytest

from crosstraffic.commands.engine import plan_with


def refuses(*names):
    def plan(name):
        if name in names:
            raise ValueError(f"{name} says no\nin two lines")
        return f"as {name}"

    return plan


@pytest.mark.parametrize(
    ("asked", "refusing", "chosen"),
    [
        pytest.param(None, (), "vllm", id="vllm first"),
        pytest.param("sglang", ("vllm",), "sglang", id="as asked"),
        pytest.param("megatron", ("vllm",), "megatron", id="asked for, no talk"),
    ],
)
def test_the_engine_asked_for_else_vllm_and_nothing_to_tell(capsys, asked, refusing, chosen):
    assert plan_with(asked, refuses(*refusing)) == (chosen, f"as {chosen}")
    assert capsys.readouterr() == ("", "")


def test_falling_to_megatron_tells_the_reason_in_one_line(capsys):
    assert plan_with(None, refuses("vllm")) == ("megatron", "as megatron")
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("shown as megatron, choose with --framework; vllm refuses: vllm says no")


@pytest.mark.parametrize("asked", [None, "vllm"])
def test_where_both_refuse_vllm_s_reason_counts(capsys, asked):
    with pytest.raises(ValueError, match="vllm says no"):
        plan_with(asked, refuses("vllm", "megatron"))
    assert capsys.readouterr().err == ""
