"""The way back from padded weights: cut the units at the end of every axis that are zero."""

from transformers import PreTrainedModel

from optimum_prune.binding import adapter_for, bind, stacks
from optimum_prune.configs import layer_types, own_configs_, stack_config
from optimum_prune.padded import is_padded, used
from optimum_prune.sizes import describe_
from optimum_prune.skipping import why_not_skip
from optimum_prune.surgery import skip_, slice_


def unpad_(model: PreTrainedModel) -> None:
    """Cut the padding, in place: units at the end of their axes that nothing reads. The model computes the same.

    Sub-layers that are zero altogether are skipped, where they can be.

    Args:
        model: its config is made truthful. Without padding it stays as it is.
    """
    if not is_padded(model):
        return
    own_configs_(model)
    for found in stacks(model, adapter_for(model)):
        kinds = layer_types(stack_config(model.config, found.stack))
        zero = [group for group in bind(model) if group.stack == found.path and used(group) == 0]
        for group in zero:
            for kind, path in found.stack.sublayers.items():
                if path == group.group.site and why_not_skip(found.stack, kinds, group.layer, kind) is None:
                    skip_(model, found, group.layer, kind)
    bound = bind(model)
    left = {group.name: max(1, used(group)) for group in bound}
    tied: dict[str, int] = {}
    for group in bound:
        if group.group.tied:  # of all blocks of a stack, and of both kinds of attention
            tied[group.stack] = max(tied.get(group.stack, 0), left[group.name])
    for group in bound:
        slice_(group, range(tied[group.stack] if group.group.tied else left[group.name]))
    layout = describe_(model)
    if record := getattr(model.config, "pruning_config", None):
        record["layout"] = layout
