"""The command `optimum-cli prune evaluate`: measurements of any checkpoint, dense or pruned."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

# not from `optimum.commands`, a namespace without names: the import would break every command of optimum-cli
from optimum.commands.base import CommandInfo

from optimum_prune.commands.command import Command, printable
from optimum_prune.commands.flags import (
    add_amount,
    add_device_map,
    add_fields,
    add_model,
    add_no_latency,
    given_fields,
    loading_options,
)
from optimum_prune.commands.output import check_json, write_json
from optimum_prune.config import CalibrationConfig
from optimum_prune.measurements import Evaluation, check_evaluation, comparison

STDOUT = Path("-")
SCHEMA = (
    "--json writes {'version': 1, 'evaluations': {NAME: VALUES}}. NAME is 'dense', 'pruned' or 'recovered'. VALUES: "
    "perplexity; loss and kl (nats per token); accuracy and exact_match (fractions); tokens, sequences, parameters "
    "(counts); weight_bytes; prefill_ms and decode_ms_per_token (medians), prefill_tokens, decode_tokens, timed_at "
    "(ISO 8601); device, threads, dtype; data (source, samples, tokens, seq_len, fingerprint); context (sentences: is "
    "it the data that the model was calibrated or trained on). What was not measured, or is not finite, is null."
)


class EvaluateCommand(Command):
    """`optimum-cli prune evaluate`: print perplexity, KL, size and latency of a checkpoint; write nothing but JSON."""

    COMMAND = CommandInfo("evaluate", help="Measure a checkpoint: perplexity, KL to the dense model, size, latency.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        add_model(parser, positional=True)
        parser.epilog = SCHEMA
        add = parser.add_argument
        add("--dataset", required=True, metavar="SOURCE", help="evaluation data: any calibration source but 'self'")
        add(
            "--dense",
            metavar="MODEL",
            help="dense model to compare with, for the KL and the ratios. A pruned checkpoint names it as base_model "
            "of pruning_config in config.json, and this command without --dense prints the name; it is downloaded only "
            "if given here",
        )
        add_amount(parser)
        data = parser.add_argument_group("data")
        add_fields(
            data, CalibrationConfig, without=("source", "num_samples", "seq_len", "seed", "selection", "candidates")
        )
        add_device_map(parser)
        add_no_latency(parser)
        add(
            "--json",
            type=Path,
            metavar="FILE",
            help="write the numbers to this file too; '-': to stdout, without a table",
        )

    @staticmethod
    def work(args: argparse.Namespace) -> None:
        """Do what was asked."""
        check_evaluation(args.dataset)
        data = CalibrationConfig(args.dataset, **given_fields(args, CalibrationConfig))
        if args.json not in (None, STDOUT):
            check_json(args.json)

        from optimum_prune.checkpoint_evaluation import evaluate_checkpoint  # here, because it brings torch

        found = evaluate_checkpoint(args.model, data, dense=args.dense, latency=args.latency, **loading_options(args))
        values = {"version": 1, "evaluations": {name: _finite(evaluation) for name, evaluation in found.items()}}
        if args.json == STDOUT:
            print(json.dumps(values, indent=2))
            return
        print(printable(comparison(found)))
        if args.json is not None:
            write_json(args.json, values)


def _finite(evaluation: Evaluation) -> dict[str, Any]:
    """Return the values of an evaluation as JSON knows them: neither infinite nor NaN."""
    values = {"loss": evaluation.loss} | evaluation.to_dict()
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
