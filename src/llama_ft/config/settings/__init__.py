"""The settings: one dataclass per section."""
