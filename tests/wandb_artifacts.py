"""What a W&B server does with artifacts, as far as wandb asks it: names, files by upload, aliases."""

import base64
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Artifacts:
    """Artifacts by id, and the files that were uploaded by the address they were given.

    `url` is the server's own; with `refuses_uploads` each upload is answered by 403.
    """

    url: str = ""
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    refuses_uploads: bool = False

    def answer(self, body: bytes) -> dict[str, Any] | None:
        """The answer to a query about artifacts, None where it is about something else."""
        asked = json.loads(body) if body.startswith(b"{") and b'"query"' in body[:12] else {}
        query, variables = asked.get("query", ""), asked.get("variables", {})
        if "query ArtifactType(" in query:
            return {"data": {"project": {"artifact": None}}}
        if "mutation CreateArtifact(" in query or "mutation CreateArtifact " in query:
            key = base64.b64encode(f"Artifact:{len(self.made)}".encode()).decode()
            self.made[key] = {"committed": False, **variables["input"]}
            artifact = {"id": key, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
            return {"data": {"createArtifact": {"artifact": artifact}}}
        if "ArtifactManifest" in query and "mutation" in query:
            name = f"manifest/{variables.get('artifactID', variables.get('artifactManifestID'))}"
            file = {"id": name, "uploadUrl": f"{self.url}/upload/{name}", "uploadHeaders": []}
            kind = "createArtifactManifest" if "mutation CreateArtifactManifest" in query else "updateArtifactManifest"
            return {"data": {kind: {"artifactManifest": {"id": variables.get("artifactID", "m"), "file": file}}}}
        if "mutation CreateArtifactFiles" in query:
            files = variables["input"]["artifactFiles"]
            return {"data": {"createArtifactFiles": {"files": {"edges": [{"node": self._file(f)} for f in files]}}}}
        if "mutation CommitArtifact" in query:
            self.made[variables["artifactID"]]["committed"] = True
            return {"data": {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": "d"}}}}
        if "query ArtifactByID" in query:
            return {"data": {"artifact": self._whole(variables["id"])}}
        return None

    def take(self, path: str, body: bytes) -> int:
        """Take an uploaded file; the status to answer with."""
        if self.refuses_uploads:
            return 403
        self.uploaded[path.removeprefix("/upload/")] = body
        return 200

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [made for made in self.made.values() if made["artifactTypeName"] == kind]

    def _file(self, file: dict[str, Any]) -> dict[str, Any]:
        name = f"{self.made[file['artifactID']]['artifactCollectionName']}/{file['name']}"
        return {
            "storagePath": name,
            "uploadUrl": f"{self.url}/upload/{name}",
            "uploadHeaders": [],
            "uploadMultipartUrls": None,
            "artifact": {"id": file["artifactID"]},
        }

    def _whole(self, key: str) -> dict[str, Any]:
        made = self.made[key]
        project = {"id": "UHJvamVjdDox", "internalId": "UHJvamVjdDox", "name": "llama_ft", "entity": {"name": "team"}}
        name = made["artifactCollectionName"]
        text = {"description": None, "metadata": made.get("metadata"), "commitHash": "c", "digest": made["digest"]}
        numbers = {"versionIndex": 0, "ttlDurationSeconds": -2, "size": 1, "fileCount": 1, "historyStep": None}
        return {
            "__typename": "Artifact",
            "id": key,
            "artifactSequence": {"__typename": "ArtifactSequence", "name": name, "project": project},
            "artifactType": {"name": made["artifactTypeName"]},
            "ttlIsInherited": True,
            "tags": [],
            "aliases": [],
            "state": "COMMITTED",
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": None,
            **text,
            **numbers,
        }
