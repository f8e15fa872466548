"""The images of this project: how they are built where there is no Docker, and what they were measured to be."""
