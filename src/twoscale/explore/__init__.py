"""`twoscale explore`: a live page to watch a looped model think (the extra `explore`)."""

import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when Gradio is imported
