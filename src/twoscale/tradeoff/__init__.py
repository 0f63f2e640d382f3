"""What leaving early saves and what it costs: sweeps, baselines, oracles, calibration, and a learned controller.

| file        | what                                                                                  |
|-------------|---------------------------------------------------------------------------------------|
| heldout     | held-out text, cut by documents into parts to fit on, to certify on and to report on  |
| stats       | intervals over documents, one-sided bounds, the Pareto front (numpy only)             |
| evaluate    | losses, steps and choices of a model under a rule; counted FLOPs                      |
| points      | what is compared: rules x thresholds, fixed depths, random exits, oracles             |
| signals     | what a rule would have seen in a full run, for any threshold                          |
| latency     | ms a token, batch 1, cached, interleaved                                              |
| sweep       | all points into sweep.jsonl, line by line                                             |
| calibrate   | thresholds for each group, with a bound on the loss                                   |
| samples     | a few texts with their steps, for the report                                          |
| bigram      | the bigram that any model should beat                                                 |
| load_run    | a run opened for measuring; what it was calibrated for                                |
| controller  | trains the heads of `exits.Learned`                                                   |
| commands    | `twoscale sweep`, `calibrate` and `eval` on a run's folder, as functions              |
| results     | what they return; no torch                                                            |
| choice      | which setting of a sweep to use; no torch                                             |
| summary     | reads sweep.jsonl and calibration.json; no torch                                      |
"""
