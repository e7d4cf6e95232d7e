"""Measure the traffic that LLM-inference parallelism puts on an interconnect, alone and together."""

__version__ = "0.1.0"
