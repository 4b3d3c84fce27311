"""What a wheel says it consists of: ``dist-info/sboms/clamp-amp.cdx.json`` (PEP 770), in CycloneDX 1.7.

clamp brings nobody else's code along, so that the list is clamp, and what it is installed with. It holds neither a date
nor a random number: the same sources make the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement
from packaging.version import Version


class SbomHook(BuildHookInterface):
    """Writes the list for the builder, and takes it away after it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = TemporaryDirectory()
        file = Path(self._folder.name) / f"{self.metadata.core.name}.cdx.json"
        file.write_text(json.dumps(bill_of_materials(self.metadata.core), indent=1) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(file))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._folder.cleanup()


def bill_of_materials(project: Any) -> dict[str, Any]:
    """The project as one component that depends on others, of which its metadata say in what versions."""
    purl = f"pkg:pypi/{project.name}@{project.version}"
    itself = {
        "type": "library",
        "bom-ref": purl,
        "name": project.name,
        "version": project.version,
        "description": project.description,
        "licenses": [{"expression": project.license_expression}],
        "purl": purl,
    }
    required = [_required(Requirement(line)) for line in project.dependencies]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "version": 1,
        "metadata": {"component": itself},
        "components": required,
        "dependencies": [{"ref": purl, "dependsOn": [component["bom-ref"] for component in required]}],
    }


def _required(needed: Requirement) -> dict[str, Any]:
    """A dependency that is not in the wheel: which version of it comes, the installer decides."""
    purl = f"pkg:pypi/{needed.name}"
    bounds = sorted(needed.specifier, key=lambda bound: Version(bound.version))
    return {
        "type": "library",
        "bom-ref": purl,
        "name": needed.name,
        "scope": "required",
        "isExternal": True,
        "versionRange": f"vers:pypi/{'|'.join(map(str, bounds))}",
        "purl": purl,
    }
