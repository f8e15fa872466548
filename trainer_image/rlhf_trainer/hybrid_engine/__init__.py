"""The 3D-HybridEngine: actor weights from the training layout to the generation layout (HybridFlow section 5)."""
