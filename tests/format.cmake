dcp_test(format archive_writer format PkgConfig::ZSTD)
