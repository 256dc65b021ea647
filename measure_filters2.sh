# stage 3: two rows of outputs at a time, more bands, then what warps wait for
export PYTHONPATH=$PWD/src:$PWD PYTHONUNBUFFERED=1
BUDGET=50 python3 measure_filters.py --two > $OUT/two.log 2>&1; tail -1 $OUT/two.log; grep best $OUT/two.log
BUDGET=30 python3 measure_filters.py --more > $OUT/more.log 2>&1; tail -1 $OUT/more.log; grep best $OUT/more.log
N=0
profile() {
    timeout 40 ncu --clock-control none --set full --import-source no -k regex:"$1" -s 1 -c 1 -f -o /tmp/prof$N python3 profile_filters.py "${@:2}" > /tmp/prof$N.log 2>&1 || tail -5 /tmp/prof$N.log
    { echo "=== ${*:2}"; ncu -i /tmp/prof$N.ncu-rep --page details; } >> $OUT/ncu-details.txt 2>&1
    { echo "=== ${*:2}"; ncu -i /tmp/prof$N.ncu-rep --page source --csv --print-units base; } >> $OUT/ncu-source.csv 2>&1
    N=$((N+1)); echo "profiled ${*:2} at $SECONDS s"
}
profile tensor_filter filter:8192x8192,3x3,replicate,uint8 tensor_filter
profile tensor_filter filter:8192x8192,3x3,replicate,uint8 tensor_filter two_rows=True depth=8 min_blocks=4
profile tensor_filter filter:8192x8192,7x7,replicate,uint8 tensor_filter
profile box_scans filter:8192x8192,255x255,box,replicate box_scans warps=16 columns=5
gzip -f $OUT/ncu-source.csv
echo "elapsed $SECONDS s"
