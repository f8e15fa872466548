"""Why a run did what it did: change points, signals and causes, from the files of a job. Pure; numpy and no network."""
