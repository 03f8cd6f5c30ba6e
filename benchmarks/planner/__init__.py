"""Plans against measured memory and published figures, and the figures in configs and pages."""
