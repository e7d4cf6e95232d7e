"""The picture of process groups: every rank a cell, every group a colour, and what is left out is said."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyBboxPatch, Rectangle

from crosstraffic.patterns.layout import FRAMEWORKS, Layout, process_groups
from crosstraffic.results.figures import GROUP_COLOURS
from crosstraffic.results.group_nodes import crossing, kinds_by_groups, shown_nodes
from crosstraffic.results.group_picture import MAX_CELLS, check_suffix, group_figure, save_picture

M1 = process_groups(Layout(tp=2, cp=2, pp=2, dp=2, ep=4), "megatron")


def figure_of(found, **options):
    figure = group_figure(found, title="a title", **options)
    (axes,) = figure.axes
    return figure, axes, [text.get_text() for text in axes.texts]


def cells(axes):
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def frames(axes):
    return [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]


def test_one_panel_for_each_different_kind_with_more_than_one_rank():
    _, axes, words = figure_of(M1)
    assert len(kinds_by_groups(M1)) == 10
    assert len(cells(axes)) == 10 * 16
    assert len(frames(axes)) == 10 * 2
    assert "a title" in words
    assert "tp-cp = ep = etp-ep" in words
    assert "8 groups of 2, across nodes" in words
    assert "Groups of one rank, not drawn: etp." in words


def test_ranks_of_one_group_have_one_colour_and_number():
    found = {"tp": process_groups(Layout(tp=2, dp=4))["tp"]}
    _, axes, words = figure_of(found)
    fills = [cell.get_facecolor() for cell in cells(axes)]
    assert fills[0::2] == fills[1::2]
    assert len(set(fills)) == 4
    numbers = words[words.index("node 0") + 1 :]
    assert numbers == [text for rank in range(8) for text in (str(rank), str(rank // 2))]


def test_sixteen_groups_differ_in_colour_or_lightness():
    found = {"dp": tuple((rank, rank + 16) for rank in range(16))}
    _, axes, _ = figure_of(found)
    fills = [cell.get_facecolor() for cell in cells(axes)]
    assert len(set(fills[:16])) == 2 * len(GROUP_COLOURS) == 16
    assert fills[:16] == fills[16:]


@pytest.mark.parametrize(
    ("layout", "framework", "ranks_per_node"),
    [
        (Layout(tp=8, pp=16, dp=1024), "vllm", 8),
        (Layout(tp=64, dp=8, ep=64, pp=8), "sglang", 8),
        (Layout(tp=8, dp=64, ep=512), "megatron", 72),
        (Layout(tp=512), "tensorrt_llm", 512),
        (Layout(tp=5, dp=127), "vllm", 7),
    ],
)
def test_many_ranks_are_bounded_and_what_is_left_out_is_said(layout, framework, ranks_per_node):
    found = process_groups(layout, framework)
    _, axes, words = figure_of(found, ranks_per_node=ranks_per_node)
    panels = len(kinds_by_groups(found))
    drawn, rest = divmod(len(cells(axes)), panels)
    assert rest == 0
    assert 0 < drawn <= MAX_CELLS
    total = sum(map(len, found["tp"]))
    assert any(f"the other {total - drawn:,} ranks are left out" in text for text in words)


def test_all_is_drawn_within_the_page():
    for layout in (Layout(tp=2), Layout(tp=8, pp=2, dp=4), Layout(tp=8, pp=16, dp=1024)):
        _, axes, _ = figure_of(process_groups(layout))
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        for patch in frames(axes):
            box = patch.get_bbox()
            assert left <= box.x0 < box.x1 <= right
            assert top <= box.y0 < box.y1 <= bottom


def test_headings_fit_their_panels():
    figure, axes, _ = figure_of(M1, names=FRAMEWORKS["megatron"].names)
    renderer = FigureCanvasAgg(figure).get_renderer()
    right = figure.bbox.width
    for text in axes.texts:
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0
        assert box.x1 <= right


def test_ranks_that_are_all_alone():
    _, axes, words = figure_of(process_groups(Layout()))
    assert cells(axes) == []
    assert "Every rank is alone in its groups." in words


def test_nodes_of_rank_0_s_peers_are_shown_first():
    found = process_groups(Layout(tp=8, pp=16, dp=1024))
    assert {0, 1, 2, 3, 16, 32, 48} <= set(shown_nodes(found, 8, 128))
    assert len(shown_nodes(found, 8, 128)) == 16
    assert shown_nodes(found, 8, 4) == (0,)
    assert shown_nodes({"tp": ((0, 1, 2),)}, 2, 8) == (0, 1)


def test_groups_that_leave_a_node_are_counted():
    assert crossing(((0, 1, 2), (3, 4, 5), (6, 7, 8)), 4) == 2
    assert crossing(((0, 1, 2), (3, 4, 5)), 3) == 0
    assert crossing(((7, 0),), 4) == 1


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_pictures_are_the_same_each_time(tmp_path, suffix):
    figure, _, _ = figure_of({"tp": ((0, 1),)})
    one, two = tmp_path / f"one.{suffix}", tmp_path / f"two.{suffix}"
    save_picture(figure, one)
    save_picture(figure, two)
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("name", ["groups.jpg", "groups", ".png", "groups.png.gz"])
def test_pictures_of_other_kinds(tmp_path, name):
    with pytest.raises(ValueError, match=r"allowed: \.png, \.svg, \.pdf"):
        check_suffix(tmp_path / name)
