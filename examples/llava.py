"""Prune the language model of a LLaVA, calibrated on pictures with captions; its vision tower stays as it is.

Add `stacks=["language", "vision"]` to prune the tower as well.
"""

from optimum_prune import CalibrationConfig, Pruner, PruningConfig


def main(model, output, calibration, evaluation):
    """Prune and save; the data sets have columns `image` and `text`."""
    config = PruningConfig(
        scorer="ntk",
        sparsity=0.3,
        calibration=CalibrationConfig(calibration, num_samples=32),
    )
    pruner = Pruner.from_pretrained(model)
    print(pruner.prune(config))
    pruner.evaluate(evaluation, num_samples=32)
    print(pruner.comparison())
    pruner.save_pretrained(output)
    return pruner


if __name__ == "__main__":
    main("llava-hf/llava-1.5-7b-hf", "llava-ntk30", "my_captions.parquet", "my_held_out_captions.parquet")
