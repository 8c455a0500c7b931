"""Ways to spoil a small Llama that a run has to notice before it changes a weight."""

import torch
from torch import nn


def plain(model):
    pass


def nan_weight(model):
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan


def nan_norm(model):
    model.model.layers[1].input_layernorm.weight.data[0] = torch.nan


def shared(model):
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight


def quantised(model):
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)


def renamed(model):
    model.config.model_type = "gpt_neox"


def on_meta(model):
    model.model.layers[1].to("meta")
