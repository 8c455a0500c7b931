"""Where the package meets transformers and the Hub: loading, layouts, model cards."""

import transformers.modeling_utils  # noqa: F401 - registers the plugin, which must not happen halfway through its own files
