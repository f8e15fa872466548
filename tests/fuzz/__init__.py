"""Random damage to everything that users, pods and the API server hand in: nothing of it may end in a traceback."""
