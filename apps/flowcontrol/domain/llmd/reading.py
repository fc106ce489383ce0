"""From llm-d's documents to ours (docs/interfaces.md, section 8: `bands`, `default_band`, `flow`, `objectives`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apps.flowcontrol.domain.fields import Fields, FlowConfigError
from apps.flowcontrol.domain.llmd import names
from apps.flowcontrol.domain.llmd.plugins import Plugins, Spread
from apps.flowcontrol.domain.llmd.quantities import duration_s, quantity

OTHER_SECTIONS = ("schedulingProfiles", "dataLayer", "requestHandler", "parser", "data")


@dataclass(frozen=True, slots=True)
class Imported:
    """The whole flow control of a partition as it would be, and what the documents said that has no counterpart here."""

    document: dict[str, Any]
    notes: tuple[str, ...]


def read(documents: Sequence[object], current: Mapping[str, Any], pool: str) -> Imported:
    """What `current` (`bands`, `default_band`, `flow`, `objectives`) becomes by these documents of the pool `pool`.

    Bands are recognised by priority. One that the documents do not list keeps its name but gets the default band's
    settings, as llm-d would treat it, while an objective leads to it, and is removed otherwise. Objectives are added or
    changed, never removed. Raises `FlowConfigError` naming the field.
    """
    reader = _Reader(copy.deepcopy(dict(current)), pool)
    by_kind: dict[str, list[Fields]] = {"EndpointPickerConfig": [], "InferenceObjective": [], names.OWN_KIND: []}
    for index, document in enumerate(documents):
        fields = Fields(document, f"documents[{index}]")
        fields = Fields(document, _name_of(fields, fields.choice("kind", "", tuple(by_kind))))
        by_kind[fields.choice("kind", "", tuple(by_kind))].append(fields)
    if not documents or all(not found for found in by_kind.values()):
        raise FlowConfigError("documents", "at least one " + ", ".join(by_kind), len(documents))
    for kind in ("EndpointPickerConfig", names.OWN_KIND):
        if len(by_kind[kind]) > 1:
            raise FlowConfigError("documents", f"at most one {kind}", len(by_kind[kind]))
    for config in by_kind["EndpointPickerConfig"]:
        reader.config(config)
    for extras in by_kind[names.OWN_KIND]:
        reader.extras(extras)
    for objective in by_kind["InferenceObjective"]:
        reader.objective(objective)
    reader.drop_unused_bands()
    return Imported(reader.document, tuple(reader.notes))


def _name_of(fields: Fields, kind: str) -> str:
    if not kind:
        raise FlowConfigError(fields.at("kind"), "EndpointPickerConfig, InferenceObjective or FlowControl", None)
    if kind == "EndpointPickerConfig":
        return ""
    metadata = fields.raw.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return f"{kind}/{name}" if name else kind


class _Reader:
    def __init__(self, document: dict[str, Any], pool: str) -> None:
        self.document = document
        self.notes: list[str] = []
        self._pool = pool
        self._listed: set[int] | None = None
        self._spread: Spread | None = None

    @property
    def _bands(self) -> list[dict[str, Any]]:
        bands: list[dict[str, Any]] = self.document["bands"]
        return bands

    # --- EndpointPickerConfig ------------------------------------------------------------------------------------

    def config(self, root: Fields) -> None:
        _check_version(root, names.API_VERSIONS)
        root.get("metadata")
        gates = root.texts("featureGates")
        if not {"flowControl", "flowControl=true"}.intersection(gates):
            self.notes.append("featureGates: flowControl is not among them; the section is taken over all the same")
        ignored = [name for name in OTHER_SECTIONS if root.get(name) is not None]
        if ignored:
            self.notes.append(f"{', '.join(ignored)}: not flow control, left alone")
        plugins = Plugins(root, self.notes)
        old_place = root.section("saturationDetector")
        flow = root.section("flowControl")
        root.refuse_others()
        self._limits(flow)
        self._gates(flow, old_place, plugins)
        self._read_bands(flow, plugins)
        if flow.flag("enableEviction", False):
            self.notes.append("flowControl.enableEviction: running requests are never recalled here")
        flow.refuse_others()
        if plugins.unused:
            self.notes.append(f"plugins: {', '.join(plugins.unused)} are not flow control, left alone")

    def _limits(self, flow: Fields) -> None:
        ours = self.document["flow"]
        for theirs, name in (("maxBytes", "max_bytes"), ("maxRequests", "max_requests")):
            given = flow.get(theirs)
            ours[name] = (quantity(flow.at(theirs), given) or None) if given is not None else None
        ttl = flow.get("defaultRequestTTL")
        ours["default_ttl_s"] = (
            names.DEFAULT_TTL_S if ttl is None else duration_s(flow.at("defaultRequestTTL"), ttl) or None
        )
        empty = flow.get("noEndpointRequestTTL")
        empty_s = ours["default_ttl_s"] if empty is None else duration_s(flow.at("noEndpointRequestTTL"), empty)
        if not empty_s:
            self.notes.append("flowControl.noEndpointRequestTTL: without an end is kept as 24 h")
        ours["empty_pool_ttl_s"] = empty_s or names.LONGEST_TTL_S

    def _gates(self, flow: Fields, old_place: Fields, plugins: Plugins) -> None:
        section = flow.section("saturationDetector")
        path, place = (section.at("pluginRef"), section) if section.raw else (old_place.at("pluginRef"), old_place)
        ref = place.text("pluginRef", names.UTILIZATION)
        place.refuse_others()
        for stage, settings in plugins.stages(path, ref).items():
            self.document["flow"][stage] |= settings
        ref = flow.get("usageLimitPolicyPluginRef")
        path = flow.at("usageLimitPolicyPluginRef")
        found: dict[str, Any] = {"policy": "static"}
        if ref is not None:
            found = plugins.ceilings(path, flow.text("usageLimitPolicyPluginRef", None))
        self._ceiling_for_all = float(found.pop("for_all", 1.0))
        self._ceilings: dict[int, float] = found.pop("by_priority", {})
        self._spread = found.pop("spread", None)
        self.document["flow"]["ceilings"] |= found

    def _read_bands(self, flow: Fields, plugins: Plugins) -> None:
        template = flow.section("defaultPriorityBand")
        template.get("priority")
        self.document["default_band"] |= self._band(template, plugins) | {"ceiling": self._ceiling_for_all}
        negative = flow.section("defaultNegativePriorityBand")
        negative.get("priority")
        self._negative = self._band(negative, plugins) if negative.raw else self._band(template, plugins)
        if negative.raw:
            self.notes.append(
                "flowControl.defaultNegativePriorityBand: used for the bands made now; later ones get defaultPriorityBand"
            )
        self._listed = set()
        by_priority: dict[int, dict[str, Any]] = {}
        for fields in flow.items("priorityBands"):
            priority = fields.integer("priority", 0)
            if priority in by_priority:
                raise FlowConfigError(fields.at("priority"), "a priority no other band has", priority)
            by_priority[priority] = self._band(fields, plugins)
        for priority, settings in sorted(by_priority.items(), reverse=True):
            self._listed.add(priority)
            self._band_of(priority).update(settings, ceiling=self._ceilings.get(priority, self._ceiling_for_all))
        for band in self._bands:
            if band["priority"] not in self._listed:
                band.update(self._template_for(band["priority"]))

    def _band(self, fields: Fields, plugins: Plugins) -> dict[str, Any]:
        fairness = fields.text("fairnessPolicyRef", names.DEFAULT_FAIRNESS)
        ordering = fields.text("orderingPolicyRef", names.DEFAULT_ORDERING)
        requests, size, ttl = fields.get("maxRequests"), fields.get("maxBytes"), fields.get("defaultRequestTTL")
        settings = {
            "fairness": plugins.policy(fields.at("fairnessPolicyRef"), fairness, names.FAIRNESS),
            "ordering": plugins.policy(fields.at("orderingPolicyRef"), ordering, names.ORDERING),
            "max_requests": _or_default(fields.at("maxRequests"), requests, names.DEFAULT_BAND_REQUESTS),
            "max_bytes": _or_default(fields.at("maxBytes"), size, names.DEFAULT_BAND_BYTES),
            "ttl_s": None if ttl is None else duration_s(fields.at("defaultRequestTTL"), ttl) or None,
        }
        fields.get("priority")
        fields.refuse_others()
        return settings

    def _template_for(self, priority: int) -> dict[str, Any]:
        template = dict(self.document["default_band"])
        if priority < 0 and self._listed is not None:
            template |= self._negative
        return template

    def _band_of(self, priority: int) -> dict[str, Any]:
        """The band of this priority; a new one of its own, from the template, where there is none."""
        for band in self._bands:
            if band["priority"] == priority:
                return band
        taken = {band["name"] for band in self._bands}
        name = f"priority-{priority}" if priority >= 0 else f"priority-minus-{-priority}"
        while name in taken:
            name += "-new"
        band = {"name": name, "priority": priority} | self._template_for(priority)
        self._bands.append(band)
        return band

    # --- our own document ----------------------------------------------------------------------------------------

    def extras(self, root: Fields) -> None:
        _check_version(root, (names.OWN_VERSION,))
        root.get("metadata")
        spec = root.section("spec")
        root.refuse_others()
        self.document["flow"]["displacement"] = spec.flag("displacement", self.document["flow"]["displacement"])
        for fields in spec.items("bands"):
            band = self._band_of(fields.integer("priority", None))
            self._rename(band, fields.text("name", band["name"]))
            self._own_settings(fields, band)
        self._own_settings(spec.section("defaultBand"), self.document["default_band"])
        automatic = spec.section("automaticLimits")
        for stage in ("prefill", "decode"):
            limits = automatic.section(stage)
            for theirs, name in (("requests", "limit_per_node"), ("tokens", "token_limit_per_node")):
                if limits.flag(theirs, False):
                    self.document["flow"][stage][name] = None
            limits.refuse_others()
        automatic.refuse_others()
        spec.refuse_others()

    def _rename(self, band: dict[str, Any], name: str) -> None:
        for objective in self.document["objectives"]:
            if objective["band"] == band["name"]:
                objective["band"] = name
        band["name"] = name

    @staticmethod
    def _own_settings(fields: Fields, band: dict[str, Any]) -> None:
        band["min_share"] = fields.number("minShare", band.get("min_share", 0.0), low=0.0, high=0.9)
        band["ceiling"] = fields.number("ceiling", band.get("ceiling", 1.0), low=0.0, high=1.0)
        for theirs, name in (("ttl", "ttl_s"), ("ttftBudget", "ttft_budget_s")):
            given = fields.get(theirs)
            if given is not None:
                band[name] = duration_s(fields.at(theirs), given) or None
        fields.refuse_others()

    # --- InferenceObjective --------------------------------------------------------------------------------------

    def objective(self, root: Fields) -> None:
        _check_version(root, names.OBJECTIVE_VERSIONS)
        root.get("status")
        metadata, spec = root.section("metadata"), root.section("spec")
        root.refuse_others()
        name = metadata.text("name", None)
        priority = spec.integer("priority", 0)
        self._check_pool(spec)
        spec.refuse_others()
        notes = metadata.section("annotations")
        objectives: list[dict[str, Any]] = self.document["objectives"]
        found = next((objective for objective in objectives if objective["name"] == name), None)
        if found is None:
            found = {"name": name, "band": "", "slo_ttft_s": None, "ttl_s": None}
            objectives.append(found)
        found["band"] = self._band_of(priority)["name"]
        for annotation, field in ((names.SLO_ANNOTATION, "slo_ttft_s"), (names.TTL_ANNOTATION, "ttl_s")):
            given = notes.get(annotation)
            if given is not None:
                found[field] = duration_s(notes.at(annotation), given) or None

    def _check_pool(self, spec: Fields) -> None:
        references = [spec.section("poolRef")] if spec.get("poolRef") is not None else []
        references += spec.items("poolRefs")
        for reference in references:
            for name in ("group", "kind"):
                reference.get(name)
            if reference.text("name", self._pool) == self._pool:
                return
        if references:
            raise FlowConfigError(references[0].at("name"), f"the pool {self._pool!r}", references[0].raw.get("name"))

    def drop_unused_bands(self) -> None:
        if self._listed is None:
            return
        used = {objective["band"] for objective in self.document["objectives"]}
        kept = [band for band in self._bands if band["priority"] in self._listed or band["name"] in used]
        self.document["bands"] = sorted(kept, key=lambda band: -int(band["priority"]))
        if self._spread is not None:
            ceilings = self._spread.over(int(band["priority"]) for band in kept)
            for band in kept:
                band["ceiling"] = ceilings[band["priority"]]


def _check_version(root: Fields, allowed: tuple[str, ...]) -> None:
    root.get("kind")
    if root.get("apiVersion") not in allowed:
        raise FlowConfigError(root.at("apiVersion"), "one of " + ", ".join(allowed), root.raw.get("apiVersion"))


def _or_default(path: str, given: object, default: int) -> int:
    return default if given is None else quantity(path, given) or default
