"""How alembic reaches the database: through the connection that ``Database.upgrade`` hands in."""

from alembic import context

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import Base
from adaptive_spec.settings import load_settings


def _migrate(connection):
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        transactional_ddl=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


handed_in = context.config.attributes.get("connection")
if handed_in is not None:
    _migrate(handed_in)
else:  # a developer's `alembic revision --autogenerate`
    database = Database(load_settings().records.url)
    with database.engine.begin() as own:
        _migrate(own)
    database.close()
