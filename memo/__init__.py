"""memo: training GPT models with ultra-long contexts."""

import os
import sys

__version__ = "0.1.0"
HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder that memo lies in
if sys.argv[:1] == ["-m"] and os.path.realpath(os.getcwd()) != os.path.realpath(HOME):
    # `python -m memo.x` puts the current folder first: whose modules lie there, perhaps beside a model of
    # others, is not asked
    sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]
