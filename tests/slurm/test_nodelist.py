"""Node lists as Slurm writes them, read and written back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.slurm.nodelist import compress, expand


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", ("n1",)),
        ("a,b", ("a", "b")),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[01-03,7]", ("n01", "n02", "n03", "n7")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("r[1-2]-n[08-09]", ("r1-n08", "r1-n09", "r2-n08", "r2-n09")),
        ("cpu[1-2],gpu3.local", ("cpu1", "cpu2", "gpu3.local")),
        ("n[1-2]-ib", ("n1-ib", "n2-ib")),
    ],
)
def test_lists_are_read(text, nodes):
    assert expand(text) == nodes


@pytest.mark.parametrize(
    "text",
    [
        "", ",", "n[", "n]", "n[1-]", "n[a]", "n[3-1]", "n[[1]]", "n1,n1", "n[1-2],n2", "-n1", "--wrap=x", "n1;reboot",
        "n$(x)", "n 1", "n1\nn2", "n[1-9999999]", "a,,b", "n[1-1000]m[1-1000]",
    ],
)  # fmt: skip
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError, match="not a node list"):
        expand(text)


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,3}(-[a-z][0-9]{1,2})?", fullmatch=True), min_size=1, unique=True))
@settings(max_examples=100, deadline=None)
def test_written_lists_name_the_same_nodes(nodes):
    assert sorted(expand(compress(nodes))) == sorted(nodes)


def test_a_large_machine_is_one_word():
    nodes = expand("gpu[00001-10000]")
    assert len(nodes) == 10_000
    assert compress(nodes) == "gpu[00001-10000]"
