"""The 3D-HybridEngine: it moves actor weights from the training to the generation layout (HybridFlow section 5)."""
