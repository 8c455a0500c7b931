"""How a pruned model is written: its form on disk, packed or padded weights, and what their headers say."""

# First of all: it registers the plugin, which must not happen when the files here are half imported.
import transformers.modeling_utils  # noqa: F401
