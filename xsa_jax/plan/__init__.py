"""Plans a run on TPUs or GPUs that are not here: memory, bytes on the wire, and predicted step time of the compiled train step."""
