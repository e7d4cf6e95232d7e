"""``crosstraffic traffic``: what a model in a layout puts on the wire in one step."""

from typing import Annotated

import typer

WORK, DATA, ENGINE, HANDOFF = "Work", "Data and placement", "Choices of the engine", "Handoff"


def traffic(
    model: Annotated[str, typer.Argument(help="Catalogue name, or path of a Hugging Face config.json.")],
    layout: Annotated[str, typer.Option("--layout", help="Degrees, as tp=8,dp=2,ep=16.")] = "tp=1",
    phase: Annotated[str, typer.Option("--phase", help="prefill, decode or handoff.")] = "decode",
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework", help="vllm, megatron, sglang or tensorrt_llm; default vllm, or megatron where vllm refuses."
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", help="Requests per data-parallel replica.", rich_help_panel=WORK)
    ] = 1,
    context: Annotated[int, typer.Option("--context", help="Tokens of each request.", rich_help_panel=WORK)] = 4096,
    cached_tokens: Annotated[
        int, typer.Option("--cached-tokens", help="Of these, in the cache before a prefill.", rich_help_panel=WORK)
    ] = 0,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", help="Tokens of a prefill or handoff; default batch x context.", rich_help_panel=WORK),
    ] = None,
    replica_tokens: Annotated[
        str | None,
        typer.Option(
            "--replica-tokens", help="Tokens of each replica where they differ, as 64,3,0,7.", rich_help_panel=WORK
        ),
    ] = None,
    padded: Annotated[
        bool,
        typer.Option("--padded", help="Replicas are padded to the largest (CUDA graphs).", rich_help_panel=WORK),
    ] = False,
    speculative: Annotated[
        int, typer.Option("--speculative", help="Speculated tokens per request in decode.", rich_help_panel=WORK)
    ] = 0,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", help="Micro-batches in a pipeline.", rich_help_panel=WORK)
    ] = 1,
    routing: Annotated[
        str,
        typer.Option(
            "--routing",
            help="uniform, power_law:ALPHA, lognormal:SIGMA, k_hot:EXPERTS, one_hot:RANK, counts:FILE or matrix:FILE.",
            rich_help_panel=WORK,
        ),
    ] = "uniform",
    seed: Annotated[int, typer.Option("--seed", help="Of the routing.", rich_help_panel=WORK)] = 0,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Activations; default the model's.", rich_help_panel=DATA)
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option("--kv-dtype", help="KV cache; default the model's.", rich_help_panel=DATA),
    ] = None,
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", help="Tokens of a page of the KV cache.", rich_help_panel=DATA)
    ] = 16,
    kv_split: Annotated[
        bool, typer.Option("--kv-split", help="K and V lie in regions of their own.", rich_help_panel=DATA)
    ] = False,
    ranks_per_node: Annotated[
        int, typer.Option("--ranks-per-node", help="Ranks fill nodes in order.", rich_help_panel=DATA)
    ] = 8,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="Say which all-reduce the engine picks on this GPU, as H100.", rich_help_panel=DATA),
    ] = None,
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            help="Gather and scatter on the TP group instead of all-reduces.",
            rich_help_panel=ENGINE,
        ),
    ] = False,
    quantized_all_reduce: Annotated[
        str | None,
        typer.Option(
            "--quantized-all-reduce", help="Format of TP all-reduces on the wire, as int4.", rich_help_panel=ENGINE
        ),
    ] = None,
    context_style: Annotated[
        str | None,
        typer.Option(
            "--context-style",
            help="ring, all_gather, ulysses, ulysses_ring or pass_q; default as the engine does.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    ulysses_ranks: Annotated[
        int | None,
        typer.Option("--ulysses-ranks", help="ulysses_ring: ranks that exchange heads.", rich_help_panel=ENGINE),
    ] = None,
    dcp_backend: Annotated[
        str, typer.Option("--dcp-backend", help="Decode context: ag_rs or a2a.", rich_help_panel=ENGINE)
    ] = "ag_rs",
    expert_backend: Annotated[
        str | None,
        typer.Option(
            "--expert-backend",
            help="As deepep_low_latency, deepep_high_throughput, alltoall, allgather_reducescatter.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    redundant_experts: Annotated[
        int, typer.Option("--redundant-experts", help="Replicas of hot experts (EPLB).", rich_help_panel=ENGINE)
    ] = 0,
    two_batch: Annotated[
        bool,
        typer.Option("--two-batch", help="Two half batches against each other (DBO, TBO).", rich_help_panel=ENGINE),
    ] = False,
    virtual_stages: Annotated[
        int,
        typer.Option(
            "--virtual-stages", help="Chunks of layers per pipeline stage (interleaving).", rich_help_panel=ENGINE
        ),
    ] = 1,
    layer_partition: Annotated[
        str | None,
        typer.Option("--layer-partition", help="Layers of each stage, as 20,20,21.", rich_help_panel=ENGINE),
    ] = None,
    model_runner: Annotated[
        str | None,
        typer.Option("--model-runner", help="vLLM's: v1 or v2 (token ids to the first stage).", rich_help_panel=ENGINE),
    ] = None,
    decode_layout: Annotated[
        str | None,
        typer.Option(
            "--decode-layout", help="Degrees of the decode pool; default as --layout.", rich_help_panel=HANDOFF
        ),
    ] = None,
    kv_schedule: Annotated[
        str | None,
        typer.Option(
            "--kv-schedule", help="Send per request, layer or chunk; default as the engine.", rich_help_panel=HANDOFF
        ),
    ] = None,
    kv_connector: Annotated[
        str | None,
        typer.Option(
            "--kv-connector", help="As nixl, nixl_push, mooncake; default the engine's.", rich_help_panel=HANDOFF
        ),
    ] = None,
    kv_direction: Annotated[
        str | None,
        typer.Option("--kv-direction", help="Decode ranks pull, or prefill ranks push.", rich_help_panel=HANDOFF),
    ] = None,
    cross_layer_blocks: Annotated[
        bool,
        typer.Option("--cross-layer-blocks", help="A page of all layers is one piece.", rich_help_panel=HANDOFF),
    ] = False,
    contiguous_blocks: Annotated[
        int | None,
        typer.Option("--contiguous-blocks", help="Pages in a row on both sides; default all.", rich_help_panel=HANDOFF),
    ] = None,
    prefill_instances: Annotated[
        int, typer.Option("--prefill-instances", help="Instances of --layout.", rich_help_panel=HANDOFF)
    ] = 1,
    decode_instances: Annotated[
        int, typer.Option("--decode-instances", help="Instances of --decode-layout.", rich_help_panel=HANDOFF)
    ] = 1,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", help="Tokens of a prefill chunk.", rich_help_panel=HANDOFF)
    ] = 8192,
    encoder_tokens: Annotated[
        int | None,
        typer.Option(
            "--encoder-tokens",
            help="Embeddings of images or audio in each request, sent by encoders of their own.",
            rich_help_panel=HANDOFF,
        ),
    ] = None,
    encoders: Annotated[int, typer.Option("--encoders", help="Encoders that send.", rich_help_panel=HANDOFF)] = 1,
    encoder_through_first: Annotated[
        bool,
        typer.Option(
            "--encoder-through-first",
            help="SGLang: to the first rank of a replica, which broadcasts.",
            rich_help_panel=HANDOFF,
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the streams of one step: operation, groups, bytes, calls, formula and source."""
    import json

    from crosstraffic.commands.engine import plan_with
    from crosstraffic.commands.errors import planning
    from crosstraffic.commands.traffic_data import (
        algorithms,
        degrees,
        encoder_data,
        handoff_data,
        replica_data,
        routing_data,
        traffic_data,
    )
    from crosstraffic.commands.traffic_handoff import Encoders, check_phase, plan_handoff
    from crosstraffic.commands.traffic_table import print_traffic
    from crosstraffic.patterns.layout import check_framework, parse_layout
    from crosstraffic.patterns.model import load_model
    from crosstraffic.patterns.phase import control_streams, left_out, notes, phase_streams
    from crosstraffic.patterns.routing import routing_fields
    from crosstraffic.patterns.setting import make_setting
    from crosstraffic.patterns.workload import Workload

    with planning("model"):
        shape = load_model(model)
    with planning("traffic"):
        workload = Workload(
            phase=phase,  # type: ignore[arg-type]
            batch=batch,
            context=context,
            cached_tokens=cached_tokens,
            tokens=tokens,
            replica_tokens=_whole_numbers("--replica-tokens", replica_tokens),
            padded=padded,
            num_micro_batches=micro_batches,
            dtype=dtype,
            kv_dtype=dtype if kv_dtype is None and phase == "handoff" else kv_dtype,
            sequence_parallel=sequence_parallel,
            quantized_all_reduce=quantized_all_reduce,
            context_style=context_style,  # type: ignore[arg-type]
            ulysses_ranks=ulysses_ranks,
            dcp_backend=dcp_backend,
            expert_backend=expert_backend,
            **routing_fields(routing),
            seed=seed,
            num_speculative=speculative,
            block_tokens=block_tokens,
            kv_split=kv_split,
            ranks_per_node=ranks_per_node,
            redundant_experts=redundant_experts,
            two_batch=two_batch,
            virtual_stages=virtual_stages,
            layer_partition=_whole_numbers("--layer-partition", layer_partition),
            model_runner=model_runner,
            kv_schedule=kv_schedule,
            chunk_tokens=chunk_tokens,
            kv_connector=kv_connector,
            kv_direction=kv_direction,
            cross_layer_blocks=cross_layer_blocks,
            contiguous_blocks=contiguous_blocks,
        )
        if framework is not None:
            check_framework(framework)
        check_phase(
            phase,
            {
                "--decode-layout": (decode_layout, None),
                "--prefill-instances": (prefill_instances, 1),
                "--decode-instances": (decode_instances, 1),
                "--block-tokens": (block_tokens, 16),
                "--chunk-tokens": (chunk_tokens, 8192),
                "--encoder-tokens": (encoder_tokens, None),
                "--encoders": (encoders, 1),
                "--encoder-through-first": (encoder_through_first, False),
            },
        )
        if gpu is not None and phase == "handoff":
            raise ValueError(f"--gpu says how a step all-reduces, a handoff does not: {gpu!r}")
        own = parse_layout(layout)
        if phase == "handoff":
            other = own if decode_layout is None else parse_layout(decode_layout)
            instances = prefill_instances, decode_instances
            asked = Encoders(number=encoders, tokens=encoder_tokens, through_first=encoder_through_first)
            chosen, planned = plan_with(
                framework, lambda name: plan_handoff(shape, (own, other), instances, workload, asked, name)
            )
            moved = planned.handoff
            data = traffic_data(shape, own, phase, chosen, (*planned.embeddings, *moved.streams), ranks_per_node)
            data |= {"decode_layout": degrees(other), **handoff_data(moved), **encoder_data(shape, planned, asked)}
        else:
            chosen, streams = plan_with(framework, lambda name: phase_streams(shape, own, workload, name))
            control = control_streams(shape, own, workload, chosen)
            data = traffic_data(shape, own, phase, chosen, (*streams, *control), ranks_per_node)
            data["left_out"] = dict(left_out(shape, own, workload, chosen, streams))
            data["notes"] = dict(notes(shape, own, workload, chosen))
            if gpu is not None:
                data["algorithms"] = algorithms(streams, chosen, gpu, ranks_per_node)
            data["routing"] = routing_data(streams)
            data |= replica_data(make_setting(shape, own, workload, chosen))
    if as_json:
        print(json.dumps(data))
    else:
        print_traffic(data, str(own) if phase != "handoff" else f"{own} -> {other}")


def _whole_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Read ``64,3,0`` into numbers."""
    numbers: list[int] = []
    for part in [] if text is None else text.split(","):
        try:
            if not (part.strip().isascii() and part.strip().isdigit()):
                raise ValueError(part)
            numbers.append(int(part))
        except ValueError as error:  # Python reads no more than 4300 digits
            raise ValueError(f"{option} takes whole numbers, as 64,3,0: {part.strip()!r}") from error
    return tuple(numbers)
