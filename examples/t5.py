"""Prune both stacks of a T5, each to its own widths.

Plain text is made into questions and answers by span corruption. A tuned T5 is better calibrated on its own task:
`CalibrationConfig("my_pairs.jsonl", text_column="question", target_column="answer")`.
"""

from optimum_prune import CalibrationConfig, Pruner, PruningConfig


def main(model, output, calibration, evaluation, **where):
    """Prune and save; every argument but `output` may be a Hub id or a local path.

    `where` says which part of the evaluation data is used: `split="test"`.
    """
    config = PruningConfig(
        scorer="ntk",
        sparsity=0.2,
        stacks=["encoder", "decoder"],  # as by default; one of them may be left alone
        calibration=CalibrationConfig(calibration, num_samples=32, seq_len=128),
    )
    pruner = Pruner.from_pretrained(model)
    print(pruner.prune(config))
    pruner.evaluate(evaluation, num_samples=32, seq_len=128, **where)
    print(pruner.comparison())
    pruner.save_pretrained(output)
    return pruner


if __name__ == "__main__":
    wikitext = "Salesforce/wikitext:wikitext-2-raw-v1"
    main("google/t5-v1_1-small", "t5-ntk20", wikitext, wikitext, split="test")
