"""llm-d's YAML forms of flow control, read and written: `InferenceObjective`s and the `flowControl` part of an
`EndpointPickerConfig`, as documents that a YAML reader has already loaded.

What those forms cannot say (a band's name, its share, automatic limits) travels in one more document of our own, kind
`FlowControl`; without it, an import leaves such things as they are. `reading` and `writing` are inverse to each other.
Source of the forms: llm-d/llm-d-router, apix/config/v1alpha1 and apix/v1alpha2, and its plugins' READMEs.
"""

from apps.flowcontrol.domain.llmd.reading import Imported, read
from apps.flowcontrol.domain.llmd.writing import write

__all__ = ["Imported", "read", "write"]
