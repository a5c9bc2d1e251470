/* table.h - aligned columns on stdout, through libsmartcols. Cells are escaped by the caller (escape.h). */
#ifndef DCP_CLI_TABLE_H
#define DCP_CLI_TABLE_H

#include <stdbool.h>

typedef struct table table;
typedef struct table_row table_row;

typedef enum table_align { TABLE_LEFT, TABLE_RIGHT, TABLE_TREE } table_align;

table *table_create(void);
/* TABLE_TREE: left, with branches drawn for rows that have a parent. */
void table_column(table *t, const char *title, table_align align);
/* A new row below the last one; parent NULL: at the top level. */
table_row *table_row_add(table *t, table_row *parent);
/* Copies the text. */
void table_cell(table_row *row, int column, const char *text);
void table_cell_printf(table_row *row, int column, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* Prints and frees. */
void table_print(table *t);
void table_free(table *t);

#endif
