"""Each pattern has a title and a colour of its own."""

from crosstraffic.patterns.encoder import encoder_handoff
from crosstraffic.results.figures import COLOURS
from crosstraffic.results.tables import PATTERNS


def test_every_pattern_has_a_title_and_its_own_colour():
    assert set(PATTERNS) == set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_streams_of_encoders_have_both():
    streams = encoder_handoff(
        encoder_ranks=(0,), prefill_ranks=(1, 2), ranks_per_replica=2, num_tokens=1, hidden=1, framework="sglang",
        through_first=True,
    )  # fmt: skip
    assert {stream.pattern for stream in streams} <= set(PATTERNS)
