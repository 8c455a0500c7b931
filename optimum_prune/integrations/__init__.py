"""Where the package meets transformers and the Hub: loading, layouts, model cards."""

# First of all: it registers the plugin, which must not happen when the files here are half imported.
import transformers.modeling_utils  # noqa: F401
