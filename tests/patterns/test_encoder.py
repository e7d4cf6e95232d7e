"""Embeddings from encoders to the ranks that prefill."""

import pytest

from crosstraffic.patterns.encoder import embedding_bytes, encoder_handoff

ONE = {"num_tokens": 576, "hidden": 4096}


def test_each_rank_of_a_replica_gets_its_requests_whole():
    (stream,) = encoder_handoff(
        encoder_ranks=(0, 1, 2), prefill_ranks=range(3, 11), ranks_per_replica=4, num_requests=5, **ONE
    )
    matrix = stream.matrix()
    assert matrix[:3, 3:].sum() == matrix.sum() == 5 * 4 * 4_718_592
    assert (matrix.sum(axis=0)[3:] // 4_718_592).tolist() == [3] * 4 + [2] * 4
    assert stream.payload_bytes == matrix.sum(axis=1).max() == 2 * 4 * 4_718_592


def test_sglang_may_send_one_copy_and_broadcast_it():
    embeddings, broadcast = encoder_handoff(
        encoder_ranks=(0, 1), prefill_ranks=range(2, 10), ranks_per_replica=4, num_requests=5, framework="sglang",
        through_first=True, **ONE,
    )  # fmt: skip
    assert (embeddings.matrix().sum(axis=0) // 4_718_592).tolist() == [0, 0, 3, 0, 0, 0, 2, 0, 0, 0]
    assert (broadcast.op, broadcast.payload_bytes, broadcast.calls_per_step) == ("broadcast", 4_718_592, 3)
    assert broadcast.groups == ((2, 3, 4, 5), (6, 7, 8, 9))
    alone = encoder_handoff(
        encoder_ranks=(0,), prefill_ranks=(1, 2), ranks_per_replica=1, framework="sglang", through_first=True, **ONE
    )
    assert [stream.name for stream in alone] == ["epd.embeddings"]


def test_deepstack_layers_multiply():
    assert embedding_bytes(100, 10, "float8_e4m3", 3) == 4000
    assert encoder_handoff(encoder_ranks=(0,), prefill_ranks=(1,), ranks_per_replica=1, num_tokens=0, hidden=1) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"framework": "megatron"}, "allowed: vllm, sglang"),
        ({"ranks_per_replica": 3}, "4 prefill ranks make no replicas of 3"),
        ({"encoder_ranks": ()}, "there must be encoder ranks"),
        ({"encoder_ranks": (2,)}, "on both sides"),
        ({"through_first": True}, "in sglang only: vllm"),
        ({"num_requests": 0}, "num_requests must be"),
        ({"num_tokens": -1}, "num_tokens must not be negative"),
    ],
)
def test_bad_use_is_refused(change, message):
    asked = {"encoder_ranks": (0,), "prefill_ranks": (1, 2, 3, 4), "ranks_per_replica": 2, **ONE, **change}
    with pytest.raises(ValueError, match=message):
        encoder_handoff(**asked)
