"""The former address of :mod:`conformance.session.plugin`, as in ``-p conformance.plugin``."""

import sys
import warnings

from conformance.session import plugin

warnings.warn(
    "conformance.plugin has moved: use conformance.session.plugin", DeprecationWarning, stacklevel=2
)
# pytest gets the plugin itself: a second module with the same hooks would run each hook twice.
sys.modules[__name__] = plugin
