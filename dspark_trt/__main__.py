# SPDX-License-Identifier: Apache-2.0
from dspark_trt.cli import main

main()
